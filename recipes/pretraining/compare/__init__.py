"""Many runs side by side: presets, launching, statistics, pictures."""
