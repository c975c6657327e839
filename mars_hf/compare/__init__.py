"""`python -m mars_hf compare`: does an optimizer help on a script of one's own, at which rate, and how sure is that?

The command (`command`) makes a plan of arms (`plan`), starts each run in a process of its own (`work`, `runs`), and
chooses what runs next from the results that lie in folders (`comparison`, `search`). It ends with a verdict
(`differences`, `verdict`) on a page (`page`, `picture`). In the process of a run, `child` trains the script as its
`order` says, and everything is recorded (`recorder`).
"""
