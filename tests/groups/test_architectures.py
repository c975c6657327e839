"""The parameters of real models that mars-shampoo and mars-m orthogonalize, against a hand-written table.

Every parameter of two or more dimensions is in one cell of its model's row, and no pattern is idle: a parameter that
changes sides fails.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import nn

from mars_hf.groups import matrix_layouts


@dataclass(frozen=True)
class Row:
    """A model and patterns of its parameters, with braces for alternatives.

    Attributes:
        name: the model's class.
        config: its config's class.
        settings: settings of the config.
        orthogonalized: weights that multiply activations.
        embedding: lookup tables, and parameters tied to them.
        head: layers that output scores, labels, boxes.
        grouped: convolutions with groups.
        single: weights of a single row or column.
        other: parameters that are added, scale or are compared: tables, tokens, states, scales, biases.
    """

    name: str
    config: str
    settings: Mapping = field(default_factory=dict)
    orthogonalized: str = ""
    embedding: str = ""
    head: str = ""
    grouped: str = ""
    single: str = ""
    other: str = ""


# Layers shared by many models.
BERT = "*.attention.self.{query,key,value}.weight *.attention.output.dense.weight *.layer.*.intermediate.dense.weight \
    *.layer.?.output.dense.weight"
BERT_TABLES = "*.embeddings.{word,position,token_type}_embeddings.weight"
BART = "*_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight"
CLIP = "*.self_attn.{q,k,v,out}_proj.weight *.mlp.fc{1,2}.weight *.patch_embedding.weight"
CLIP_TABLES = "*.{token,position}_embedding.weight"
LLAMA = "*.self_attn.{q,k,v,o}_proj.weight *.mlp.{gate,up,down}_proj.weight"
LLAMA_MOE = "*.self_attn.{q,k,v,o}_proj.weight *.experts.{gate_up,down}_proj"
SHARED_EXPERT = "*.shared_expert*.{gate,up,down}_proj.weight"
T5 = "*Attention.{q,k,v,o}.weight"
VIT = "*.attention.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight *.patch_embeddings.projection.weight"
XLM = "*.{q,k,v,out}_lin.weight *.lin{1,2}.weight"
WAV2VEC2 = "*.feature_extractor.conv_layers.*.conv.weight *.feature_projection.projection.weight \
    *.attention.{k,v,q,out}_proj.weight *.feed_forward.{intermediate,output}_dense.weight"
POS_CONV = "*.pos_conv_embed.conv.parametrizations.weight.original1"
MAGNITUDE = "*.parametrizations.weight.original0"
ONE = {"num_hidden_layers": 1}
ONE_TOWER = {"text_config": ONE, "vision_config": ONE}

TABLE = {
    # --- text: encoders ----------------------------------------------------------------------------------------------
    "bert for pre-training": Row(
        "BertForPreTraining",
        "BertConfig",
        ONE,
        orthogonalized=f"{BERT} bert.pooler.dense.weight cls.predictions.transform.dense.weight",
        embedding=BERT_TABLES,  # the decoder is tied
        head="cls.seq_relationship.weight",
    ),
    "bert for classification": Row(
        "BertForSequenceClassification",
        "BertConfig",
        ONE,
        orthogonalized=f"{BERT} bert.pooler.dense.weight",
        embedding=BERT_TABLES,
        head="classifier.weight",
    ),
    "roberta for masked tokens": Row(
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**ONE, "tie_word_embeddings": False},
        orthogonalized=f"{BERT} lm_head.dense.weight",  # hidden before the vocabulary, as in BERT
        embedding=BERT_TABLES,
        head="lm_head.decoder.weight",
    ),
    "roberta for classification": Row(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        ONE,
        orthogonalized=BERT,
        embedding=BERT_TABLES,
        head="classifier.{dense,out_proj}.weight",
    ),
    "distilbert for classification": Row(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"n_layers": 1},
        orthogonalized=XLM,
        embedding="*.{word,position}_embeddings.weight",
        head="pre_classifier.weight classifier.weight",
    ),
    "albert for pre-training": Row(
        "AlbertForPreTraining",
        "AlbertConfig",
        ONE,
        orthogonalized="*.embedding_hidden_mapping_in.weight *.attention.{query,key,value,dense}.weight *.ffn.weight \
            *.ffn_output.weight albert.pooler.weight predictions.dense.weight",
        embedding=BERT_TABLES,
        head="sop_classifier.classifier.weight",
    ),
    "electra for pre-training": Row(
        "ElectraForPreTraining",
        "ElectraConfig",
        ONE,
        orthogonalized=f"{BERT} electra.embeddings_project.weight discriminator_predictions.dense.weight",
        embedding=BERT_TABLES,
        head="discriminator_predictions.dense_prediction.weight",
    ),
    "electra for multiple choice": Row(
        "ElectraForMultipleChoice",
        "ElectraConfig",
        ONE,
        orthogonalized=f"{BERT} electra.embeddings_project.weight",
        embedding=BERT_TABLES,
        head="sequence_summary.summary.weight classifier.weight",
    ),
    "deberta for tokens": Row(
        "DebertaForTokenClassification",
        "DebertaConfig",
        {**ONE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        orthogonalized="*.attention.self.{in,pos,pos_q}_proj.weight *.attention.output.dense.weight \
            *.intermediate.dense.weight *.layer.0.output.dense.weight",
        embedding="*.{word,position,rel}_embeddings.weight",
        head="classifier.weight",
    ),
    "deberta-v2 for questions": Row(
        "DebertaV2ForQuestionAnswering",
        "DebertaV2Config",
        {**ONE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 3},
        orthogonalized="*.attention.self.{query,key,value,pos_key,pos_query}_proj.weight *.encoder.conv.conv.weight \
            *.attention.output.dense.weight *.intermediate.dense.weight *.layer.0.output.dense.weight",
        embedding="*.{word,position,rel}_embeddings.weight",
        head="qa_outputs.weight",
    ),
    "xlnet for classification": Row(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"n_layer": 1},
        orthogonalized="*.rel_attn.{q,k,v,o,r} *.ff.layer_{1,2}.weight",
        embedding="transformer.word_embedding.weight",
        head="sequence_summary.summary.weight logits_proj.weight",
        other="transformer.mask_emb *.rel_attn.r_{r,s,w}_bias *.rel_attn.seg_embed",
    ),
    "xlnet for questions": Row(
        "XLNetForQuestionAnswering",
        "XLNetConfig",
        {"n_layer": 1},
        orthogonalized="*.rel_attn.{q,k,v,o,r} *.ff.layer_{1,2}.weight",
        embedding="transformer.word_embedding.weight",
        head="{start_logits.dense,end_logits.dense_?,answer_class.dense_?}.weight",
        other="transformer.mask_emb *.rel_attn.r_{r,s,w}_bias *.rel_attn.seg_embed",
    ),
    "xlm for classification": Row(
        "XLMForSequenceClassification",
        "XLMConfig",
        {"n_layers": 1},
        orthogonalized=XLM,
        embedding="transformer.{position_embeddings,embeddings}.weight",
        head="sequence_summary.summary.weight",
    ),
    "flaubert for multiple choice": Row(
        "FlaubertForMultipleChoice",
        "FlaubertConfig",
        {"n_layers": 1},
        orthogonalized=XLM,
        embedding="transformer.{position_embeddings,embeddings}.weight",
        head="sequence_summary.summary.weight logits_proj.weight",
    ),
    "funnel for classification": Row(
        "FunnelForSequenceClassification",
        "FunnelConfig",
        {"block_sizes": [1, 1], "num_decoder_layers": 1},
        orthogonalized="*.attention.{q,k,v}_head.weight *.attention.post_proj.weight *.attention.r_kernel \
            *.ffn.linear_{1,2}.weight",
        embedding="*.word_embeddings.weight",
        head="classifier.linear_{hidden,out}.weight",
        other="*.attention.r_{w,r,s}_bias *.attention.seg_embed",
    ),
    "squeezebert for masked tokens": Row(  # four groups in its pointwise convolutions
        "SqueezeBertForMaskedLM",
        "SqueezeBertConfig",
        ONE,
        orthogonalized="*.post_attention.conv1d.weight *.pooler.dense.weight cls.predictions.transform.dense.weight",
        embedding=BERT_TABLES,
        grouped="*.attention.{query,key,value}.weight *.{intermediate,output}.conv1d.weight",
    ),
    "convbert for classification": Row(
        "ConvBertForSequenceClassification",
        "ConvBertConfig",
        ONE,
        orthogonalized=f"{BERT} *.key_conv_attn_layer.pointwise.weight *.conv_{{kernel,out}}_layer.weight",
        embedding=BERT_TABLES,
        head="classifier.{dense,out_proj}.weight",
        grouped="*.key_conv_attn_layer.depthwise.weight",
        other="*.key_conv_attn_layer.bias",
    ),
    "ibert for masked tokens": Row(  # QuantLinear and QuantEmbedding are not Linear and Embedding
        "IBertForMaskedLM",
        "IBertConfig",
        ONE,
        orthogonalized=f"{BERT} lm_head.dense.weight",
        embedding=BERT_TABLES,
    ),
    "mobilebert for masked tokens": Row(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        ONE,
        orthogonalized="*.attention.self.{query,key,value}.weight *.attention.output.dense.weight \
            *.intermediate.dense.weight *.layer.0.output.dense.weight *.ffn.?.output.dense.weight \
            *.bottleneck.dense.weight *.bottleneck.{input,attention}.dense.weight *.embedding_transformation.weight \
            cls.predictions.transform.dense.weight",
        embedding=BERT_TABLES,
        head="cls.predictions.dense.weight",  # concatenated with the embeddings: 384 more columns of the vocabulary
    ),
    "modernbert for classification": Row(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        ONE,
        orthogonalized="*.attn.{Wqkv,Wo}.weight *.mlp.{Wi,Wo}.weight",
        embedding="*.tok_embeddings.weight",
        head="head.dense.weight classifier.weight",
    ),
    "modernbert for masked tokens": Row(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        ONE,
        orthogonalized="*.attn.{Wqkv,Wo}.weight *.mlp.{Wi,Wo}.weight head.dense.weight",
        embedding="*.tok_embeddings.weight",
    ),
    "canine for tokens": Row(
        "CanineForTokenClassification",
        "CanineConfig",
        ONE,
        orthogonalized=f"{BERT} canine.{{chars_to_molecules,projection}}.conv.weight canine.pooler.dense.weight",
        embedding="*.HashBucketCodepointEmbedder_?.weight *.{char_position,token_type}_embeddings.weight",
        head="classifier.weight",
    ),
    "reformer for classification": Row(
        "ReformerForSequenceClassification",
        "ReformerConfig",
        {"attn_layers": ["local", "lsh"]},
        orthogonalized="*.self_attention.{query,key,value,query_key}.weight *.attention.output.dense.weight \
            *.feed_forward.dense.dense.weight *.feed_forward.output.dense.weight",
        embedding="*.word_embeddings.weight",
        head="classifier.{dense,out_proj}.weight",
        other="*.position_embeddings.weights.?",  # axial
    ),
    "luke for entities": Row(
        "LukeForEntityClassification",
        "LukeConfig",
        ONE,
        orthogonalized=f"{BERT} *.attention.self.{{w2e,e2w,e2e}}_query.weight *.entity_embedding_dense.weight \
            luke.pooler.dense.weight",
        embedding="*.{word,position,token_type,entity}_embeddings.weight",
        head="classifier.weight",
    ),
    "bigbird for questions": Row(
        "BigBirdForQuestionAnswering",
        "BigBirdConfig",
        ONE,
        orthogonalized=BERT,
        embedding=BERT_TABLES,
        head="qa_classifier.{intermediate.dense,output.dense,qa_outputs}.weight",
    ),
    "visualbert for reasoning": Row(
        "VisualBertForVisualReasoning",
        "VisualBertConfig",
        ONE,
        orthogonalized=f"{BERT} *.visual_projection.weight visual_bert.pooler.dense.weight",
        embedding=f"{BERT_TABLES} *.visual_{{position,token_type}}_embeddings.weight",
        head="cls.weight",
    ),
    # --- text: decoders ----------------------------------------------------------------------------------------------
    "gpt2 with two heads": Row(
        "GPT2DoubleHeadsModel",
        "GPT2Config",
        {"n_layer": 1},
        orthogonalized="*.attn.c_{attn,proj}.weight *.mlp.c_{fc,proj}.weight",
        embedding="transformer.w{t,p}e.weight",
        head="multiple_choice_head.summary.weight",
    ),
    "gptj": Row(
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_layer": 1},
        orthogonalized="*.attn.{k,v,q,out}_proj.weight *.mlp.fc_{in,out}.weight",
        embedding="transformer.wte.weight",
        head="lm_head.weight",
    ),
    "llama for classification": Row(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        ONE,
        orthogonalized=LLAMA,
        embedding="model.embed_tokens.weight",
        head="score.weight",
    ),
    "falcon": Row(  # FalconLinear derives from Linear
        "FalconForCausalLM",
        "FalconConfig",
        ONE,
        orthogonalized="*.self_attention.{query_key_value,dense}.weight *.mlp.dense_{h_to_4h,4h_to_h}.weight",
        embedding="transformer.word_embeddings.weight",
    ),
    "mpt": Row(
        "MptForCausalLM",
        "MptConfig",
        {"n_layers": 1},
        orthogonalized="*.attn.{Wqkv,out_proj}.weight *.ffn.{up,down}_proj.weight",
        embedding="transformer.wte.weight",
    ),
    "opt": Row(
        "OPTForCausalLM",
        "OPTConfig",
        ONE,
        orthogonalized=BART,
        embedding="*.embed_{tokens,positions}.weight",
    ),
    "ctrl": Row(
        "CTRLLMHeadModel",
        "CTRLConfig",
        {"n_layer": 1},
        orthogonalized="*.multi_head_attention.{Wq,Wk,Wv,dense}.weight *.ffn.?.weight",
        embedding="transformer.w.weight",
    ),
    # --- text: experts -----------------------------------------------------------------------------------------------
    "mixtral": Row(
        "MixtralForCausalLM",
        "MixtralConfig",
        ONE,
        orthogonalized=f"{LLAMA_MOE} *.mlp.gate.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    ),
    "gpt-oss": Row(
        "GptOssForCausalLM",
        "GptOssConfig",
        ONE,
        orthogonalized=f"{LLAMA_MOE} *.mlp.router.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        other="*.experts.{gate_up,down}_proj_bias",
    ),
    "llama4": Row(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        ONE,
        orthogonalized=f"{LLAMA_MOE} {SHARED_EXPERT} *.feed_forward.router.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    ),
    "qwen2-moe": Row(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        ONE,
        orthogonalized=f"{LLAMA_MOE} {SHARED_EXPERT} *.mlp.gate.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        single="*.mlp.shared_expert_gate.weight",
    ),
    "jetmoe": Row(  # its stacks of experts are JetMoeParallelExperts
        "JetMoeForCausalLM",
        "JetMoeConfig",
        ONE,
        orthogonalized="*.{input,output}_linear.weight *.router.layer.weight *.kv_proj.weight",
        embedding="model.embed_tokens.weight",
    ),
    "deepseek-v3": Row(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"num_hidden_layers": 4},
        orthogonalized=f"*.self_attn.{{q_a,q_b,kv_b,o}}_proj.weight *.kv_a_proj_with_mqa.weight \
            *.mlp.{{gate,up,down}}_proj.weight *.experts.{{gate_up,down}}_proj {SHARED_EXPERT} *.mlp.gate.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    ),
    "deepseek-v4": Row(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        ONE,
        orthogonalized=f"*.self_attn.{{q_a,q_b,kv,o_a,o_b}}_proj.weight *.compressor.{{kv,gate}}_proj.weight \
            *.experts.{{gate_up,down}}_proj {SHARED_EXPERT} *.mlp.gate.weight *.{{attn,ffn}}_hc.fn",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight model.hc_head.hc_fn",
        other="*.compressor.position_bias",
    ),
    "dbrx": Row(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 50},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 100.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 3, "moe_top_k": 1, "hidden_size": 32},
        },
        orthogonalized="*.attn.{Wqkv,out_proj}.weight *.router.layer.weight *.experts.mlp.{w1,v1,w2}",
        embedding="transformer.wte.weight",
        head="lm_head.weight",
    ),
    "phimoe": Row(  # its router derives from Linear
        "PhimoeForCausalLM",
        "PhimoeConfig",
        ONE,
        orthogonalized=f"{LLAMA_MOE} *.mlp.router.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    ),
    "nllb-moe": Row(  # the classifier in its routers is not a head
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            **{"encoder_layers": 1, "decoder_layers": 1, "num_experts": 2},
            **{"encoder_sparse_step": 1, "decoder_sparse_step": 1},
        },
        orthogonalized="*.self_attn.{q,k,v,out}_proj.weight *.cross_attention.{q,k,v,out}_proj.weight \
            *.router.classifier.weight *.experts.expert_?.fc{1,2}.weight",
        embedding="model.shared.weight",
    ),
    # --- text: states and recurrences --------------------------------------------------------------------------------
    "mamba": Row(
        "MambaForCausalLM",
        "MambaConfig",
        ONE,
        orthogonalized="*.mixer.{in,x,dt,out}_proj.weight",
        embedding="backbone.embeddings.weight",
        grouped="*.mixer.conv1d.weight",
        other="*.mixer.A_log",
    ),
    "mamba2": Row(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        ONE,
        orthogonalized="*.mixer.{in,out}_proj.weight",
        embedding="backbone.embeddings.weight",
        head="lm_head.weight",
        grouped="*.mixer.conv1d.weight",
    ),
    "jamba": Row(
        "JambaForCausalLM",
        "JambaConfig",
        {"num_hidden_layers": 8},
        orthogonalized="*.mamba.{in,x,dt,out}_proj.weight *.self_attn.{q,k,v,o}_proj.weight \
            *.feed_forward.{gate,up,down}_proj.weight *.router.weight *.experts.{gate_up,down}_proj",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        grouped="*.mamba.conv1d.weight",
        other="*.mamba.A_log",
    ),
    "zamba": Row(  # x_proj and dt_proj of each of its heads
        "ZambaForCausalLM",
        "ZambaConfig",
        {"num_hidden_layers": 9},
        orthogonalized="*.{q,k,v,o}_proj.weight *.{gate,up,down}_proj.weight *.mamba.{in,out}_proj.weight \
            *.mamba.{x,dt}_proj_weight *.linear.weight",
        embedding="model.embed_tokens.weight",
        grouped="*.mamba.conv1d.weight",
        other="*.mamba.A_log *.mamba.D *.mamba.dt_proj_bias",
    ),
    "nemotron-h": Row(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        orthogonalized="*.mixer.{in,out,q,k,v,o,up,down}_proj.weight *.shared_experts.{up,down}_proj.weight \
            *.mixer.experts.{up,down}_proj *.mixer.gate.weight",
        embedding="model.embeddings.weight",
        head="lm_head.weight",
        grouped="*.mixer.conv1d.weight",
    ),
    "recurrent-gemma": Row(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3},
        orthogonalized="*.linear_{y,x,out}.weight *.{q,k,v,o}_proj.weight *.mlp_block.{gate,up,down}_proj.weight \
            *.rg_lru.{input,recurrent}_gate_weight",
        embedding="model.embed_tokens.weight",
        grouped="*.conv_1d.weight",
        other="*.rg_lru.{input,recurrent}_gate_bias",
    ),
    "rwkv": Row(
        "RwkvForCausalLM",
        "RwkvConfig",
        ONE,
        orthogonalized="*.attention.{key,value,receptance,output}.weight *.feed_forward.{key,value,receptance}.weight",
        embedding="rwkv.embeddings.weight",
        head="head.weight",
        other="*.time_mix_{key,value,receptance}",
    ),
    "xlstm": Row(
        "xLSTMForCausalLM",
        "xLSTMConfig",
        ONE,
        orthogonalized="*.mlstm_layer.{q,k,v,out_proj}.weight *.{o,i,f}gate_preact.weight \
            *.ffn.proj_{up,up_gate,down}.weight",
        embedding="backbone.embeddings.weight",
        head="lm_head.weight",
    ),
    # --- text: encoders and decoders ---------------------------------------------------------------------------------
    "t5": Row(
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 1, "feed_forward_proj": "gated-gelu"},
        orthogonalized=f"{T5} *.DenseReluDense.{{wi_0,wi_1,wo}}.weight",
        embedding="shared.weight *.relative_attention_bias.weight",
    ),
    "switch transformers": Row(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"num_layers": 2, "num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1},
        orthogonalized=f"{T5} *.mlp.w{{i,o}}.weight *.router.classifier.weight *.experts.expert_?.w{{i,o}}.weight",
        embedding="shared.weight *.relative_attention_bias.weight",
    ),
    "bart for classification": Row(
        "BartForSequenceClassification",
        "BartConfig",
        {"encoder_layers": 1, "decoder_layers": 1},
        orthogonalized=BART,
        embedding="model.shared.weight *.embed_positions.weight",
        head="classification_head.{dense,out_proj}.weight",
    ),
    # --- images ------------------------------------------------------------------------------------------------------
    "vit": Row(
        "ViTForImageClassification",
        "ViTConfig",
        ONE,
        orthogonalized=VIT,
        head="classifier.weight",
        other="*.cls_token *.position_embeddings",
    ),
    "vit mae": Row(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {**ONE, "decoder_num_hidden_layers": 1},
        orthogonalized=f"{VIT} decoder.decoder_embed.weight",
        head="decoder.decoder_pred.weight",
        other="*.cls_token decoder.mask_token",  # positions are frozen
    ),
    "swin": Row(
        "SwinForImageClassification",
        "SwinConfig",
        {"depths": [1, 1], "num_heads": [3, 6]},
        orthogonalized=f"{VIT} *.downsample.reduction.weight",
        head="classifier.weight",
        other="*.relative_position_bias_table",
    ),
    "swinv2": Row(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"depths": [1, 1], "num_heads": [3, 6]},
        orthogonalized="*.attention.self.{query,key,value}.weight *.attention.output.dense.weight \
            *.blocks.0.{intermediate,output}.dense.weight *.continuous_position_bias_mlp.?.weight \
            *.downsample.reduction.weight *.patch_embeddings.projection.weight",
        head="classifier.weight",
        other="*.logit_scale",
    ),
    "convnextv2": Row(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.patch_embeddings.weight *.pwconv{1,2}.weight *.downsampling_layer.1.weight",
        head="classifier.weight",
        grouped="*.dwconv.weight",
        other="*.grn.{weight,bias}",
    ),
    "resnet": Row(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.convolution.weight",
        head="classifier.1.weight",
    ),
    "regnet": Row(
        "RegNetForImageClassification",
        "RegNetConfig",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.embedder.convolution.weight *.shortcut.convolution.weight *.layer.{0,3}.convolution.weight \
            *.attention.{0,2}.weight",
        head="classifier.1.weight",
        grouped="*.layer.1.convolution.weight",
    ),
    "efficientnet": Row(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {"num_block_repeats": [1] * 7, "depth_coefficient": 1.0},
        orthogonalized="*.embeddings.convolution.weight *.squeeze_excite.{reduce,expand}.weight *.project_conv.weight \
            *.expand_conv.weight *.top_conv.weight",
        head="classifier.weight",
        grouped="*.depthwise_conv.weight",
    ),
    "mobilenet-v2 for segmentation": Row(
        "MobileNetV2ForSemanticSegmentation",
        "MobileNetV2Config",
        orthogonalized="*.{first_conv,reduce_1x1,expand_1x1,conv_1x1}.convolution.weight \
            segmentation_head.{conv_pool,conv_aspp,conv_projection}.convolution.weight",
        head="segmentation_head.classifier.convolution.weight",
        grouped="*.conv_3x3.convolution.weight",
    ),
    "levit": Row(
        "LevitForImageClassificationWithTeacher",
        "LevitConfig",
        {"depths": [1, 1, 1]},
        orthogonalized="levit.patch_embeddings.*.convolution.weight levit.*.linear.weight",
        head="{classifier,classifier_distill}.linear.weight",
        other="*.attention_biases",
    ),
    "swiftformer": Row(
        "SwiftFormerForImageClassification",
        "SwiftFormerConfig",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.patch_embedding.?.weight *.point_wise_conv{1,2}.weight \
            *.attn.{to_query,to_key,proj,final}.weight \
            *.linear.fc{1,2}.weight *.network.?.proj.weight",
        head="head.weight dist_head.weight",
        grouped="*.depth_wise_conv.weight",
        other="*.layer_scale *.layer_scale_{1,2} *.attn.w_g",
    ),
    "hgnet-v2": Row(
        "HGNetV2ForImageClassification",
        "HGNetV2Config",
        orthogonalized="embedder.*.convolution.weight *.layers.?.convolution.weight \
            *.layers.?.conv1.convolution.weight \
            *.aggregation.?.convolution.weight",
        head="fc.weight",
        grouped="*.downsample.convolution.weight *.conv2.convolution.weight",
    ),
    "pvt": Row(
        "PvtForImageClassification",
        "PvtConfig",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.patch_embeddings.?.projection.weight *.self.{query,key,value,sequence_reduction}.weight \
            *.attention.output.dense.weight *.mlp.dense{1,2}.weight",
        head="classifier.weight",
        other="*.position_embeddings *.cls_token",
    ),
    "dinov2 with registers": Row(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        ONE,
        orthogonalized=VIT,
        head="classifier.weight",
        other="*.{cls_token,mask_token,register_tokens,position_embeddings}",
    ),
    "beit for masked images": Row(
        "BeitForMaskedImageModeling",
        "BeitConfig",
        {**ONE, "use_relative_position_bias": True},
        orthogonalized=VIT,
        head="lm_head.weight",
        other="*.cls_token *.relative_position_bias_table",
    ),
    "segformer": Row(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"depths": [1, 1, 1, 1]},
        orthogonalized="*.patch_embeddings.proj.weight *.attention.{q,k,v,o}_proj.weight *.sequence_reduction.weight \
            *.mlp.fc{1,2}.weight decode_head.linear_projections.?.proj.weight decode_head.linear_fuse.weight",
        head="decode_head.classifier.weight",
        grouped="*.dwconv.dwconv.weight",
    ),
    "dpt for depth": Row(
        "DPTForDepthEstimation",
        "DPTConfig",
        {"num_hidden_layers": 2, "backbone_out_indices": [0, 0, 1, 1]},
        orthogonalized="*.attention.attention.{query,key,value}.weight *.attention.output.dense.weight \
            *.intermediate.dense.weight *.layer.?.output.dense.weight *.projection.weight *.resize.weight \
            neck.convs.?.weight *.readout_projects.?.0.weight *.convolution{1,2}.weight head.head.{0,2}.weight",
        head="head.head.4.weight",
        other="*.cls_token *.position_embeddings",
    ),
    "sam": Row(
        "SamModel",
        "SamConfig",
        {"vision_config": ONE},
        orthogonalized="*.attn.{qkv,proj}.weight *.mlp.lin{1,2}.weight *.patch_embed.projection.weight \
            *.neck.conv{1,2}.weight \
            *.mask_embed.conv{1,2,3}.weight *.{self_attn,cross_attn_*,final_attn_*}.{q,k,v,out}_proj.weight \
            *.upscale_conv{1,2}.weight *.output_hypernetworks_mlps.*.weight",
        embedding="shared_image_embedding.positional_embedding *.{no_mask,not_a_point}_embed.weight \
            *.point_embed.?.weight \
            *.{iou_token,mask_tokens}.weight",
        head="*.iou_prediction_head.*",
        other="*.pos_embed *.rel_pos_{h,w}",
    ),
    "superpoint": Row(
        "SuperPointForKeypointDetection",
        "SuperPointConfig",
        orthogonalized="encoder.*.conv_{a,b}.weight *.conv_score_a.weight *.conv_descriptor_{a,b}.weight",
        head="*.conv_score_b.weight",
    ),
    "yolos": Row(
        "YolosForObjectDetection",
        "YolosConfig",
        ONE,
        orthogonalized="*.attention.attention.{query,key,value}.weight *.attention.output.dense.weight \
            *.intermediate.dense.weight *.layer.?.output.dense.weight *.projection.weight",
        head="class_labels_classifier.* bbox_predictor.*",
        other="*.{cls_token,detection_tokens,position_embeddings,mid_position_embeddings}",
    ),
    "rt-detr": Row(
        "RTDetrForObjectDetection",
        "RTDetrConfig",
        {"encoder_layers": 1, "decoder_layers": 1},
        orthogonalized="*.convolution.weight *.{encoder,decoder}_input_proj.?.0.weight \
            *.self_attn.{q,k,v,o}_proj.weight \
            *.mlp.fc{1,2}.weight *.conv.weight *.enc_output.0.weight *.query_pos_head.layers.?.weight \
            *.encoder_attn.{sampling_offsets,attention_weights,value_proj,output_proj}.weight",
        embedding="*.denoising_class_embed.weight",
        head="*.enc_score_head.weight *.enc_bbox_head.* *.decoder.class_embed.* *.decoder.bbox_embed.*",
    ),
    "owl-vit": Row(
        "OwlViTForObjectDetection",
        "OwlViTConfig",
        ONE_TOWER,
        orthogonalized=f"{CLIP} owlvit.{{visual,text}}_projection.weight",
        embedding=CLIP_TABLES,
        head="class_head.* box_head.*",
    ),
    "mask2former": Row(
        "Mask2FormerModel",
        "Mask2FormerConfig",
        {"encoder_layers": 1, "decoder_layers": 2},
        orthogonalized=f"{VIT} *.downsample.reduction.weight *.input_projections.?.0.weight \
            *.layers.?.fc{{1,2}}.weight \
            *.self_attn.{{sampling_offsets,attention_weights,value_proj,output_proj}}.weight *.mask_projection.weight \
            *.{{adapter_1,layer_1}}.0.weight *.self_attn.{{q,k,v,out}}_proj.weight *.cross_attn.in_proj_weight \
            *.cross_attn.out_proj.weight *.mask_embedder.*.weight",
        embedding="*.queries_{embedder,features}.weight transformer_module.level_embed.weight",
        other="*.relative_position_bias_table pixel_level_module.decoder.level_embed",
    ),
    # --- sound -------------------------------------------------------------------------------------------------------
    "wav2vec2 for ctc": Row(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        ONE,
        orthogonalized=WAV2VEC2,
        head="lm_head.weight",
        grouped=POS_CONV,
        other=MAGNITUDE,
    ),
    "wav2vec2 for pre-training": Row(
        "Wav2Vec2ForPreTraining",
        "Wav2Vec2Config",
        ONE,
        orthogonalized=f"{WAV2VEC2} quantizer.weight_proj.weight project_{{hid,q}}.weight",
        grouped=POS_CONV,
        other=f"{MAGNITUDE} quantizer.codevectors",
    ),
    "wav2vec2-conformer for ctc": Row(
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        {**ONE, "vocab_size": 32, "position_embeddings_type": "relative"},
        orthogonalized="*.conv_layers.*.conv.weight *.feature_projection.projection.weight \
            *.ffn{1,2}.{intermediate,output}_dense.weight *.self_attn.linear_{q,k,v,out,pos}.weight \
            *.pointwise_conv{1,2}.weight",
        head="lm_head.weight",
        grouped=f"{POS_CONV} *.depthwise_conv.weight",
        other=f"{MAGNITUDE} *.self_attn.pos_bias_{{u,v}}",
    ),
    "wavlm for speakers": Row(
        "WavLMForXVector",
        "WavLMConfig",
        ONE,
        orthogonalized=f"{WAV2VEC2} *.gru_rel_pos_linear.weight projector.weight tdnn.*.kernel.weight \
            feature_extractor.weight",
        embedding="*.rel_attn_embed.weight",
        head="classifier.weight",
        grouped=POS_CONV,
        other=f"{MAGNITUDE} *.gru_rel_pos_const objective.weight",
    ),
    "parakeet for ctc": Row(
        "ParakeetForCTC",
        "ParakeetCTCConfig",
        {"encoder_config": ONE},
        orthogonalized="encoder.subsampling.layers.{0,3,6}.weight encoder.subsampling.linear.weight \
            *.feed_forward{1,2}.linear{1,2}.weight *.self_attn.{q,k,v,o,relative_k}_proj.weight \
            *.pointwise_conv{1,2}.weight",
        head="ctc_head.weight",
        grouped="encoder.subsampling.layers.{2,5}.weight *.depthwise_conv.weight",
        other="*.self_attn.bias_{u,v}",
    ),
    "fastspeech2-conformer": Row(
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerConfig",
        {"encoder_layers": 1, "decoder_layers": 1},
        orthogonalized="*.self_attn.linear_{q,k,v,out,pos}.weight \
            *.{feed_forward,feed_forward_macaron}.conv{1,2}.weight \
            *.pointwise_conv{1,2}.weight *_predictor.conv_layers.?.conv.weight \
            speech_decoder_postnet.layers.?.conv.weight",
        embedding="encoder.embed.weight",
        head="speech_decoder_postnet.feat_out.weight",
        grouped="*.depthwise_conv.weight",
        single="{duration,pitch,energy}_predictor.linear.weight {pitch,energy}_embed.conv.weight",
        other="*.self_attn.pos_bias_{u,v}",
    ),
    "encodec": Row(
        "EncodecModel",
        "EncodecConfig",
        orthogonalized="encoder.*.parametrizations.weight.original1 *.lstm.weight_{ih,hh}_l{0,1} \
            decoder.layers.{0,3,6,9,12}.conv.parametrizations.weight.original1 \
            decoder.*.{shortcut,block.?}.conv.parametrizations.weight.original1",
        single="decoder.layers.15.conv.parametrizations.weight.original1",
        other=MAGNITUDE,
    ),
    "dac": Row(
        "DacModel",
        "DacConfig",
        {"downsampling_ratios": [2, 2], "upsampling_ratios": [2, 2]},
        orthogonalized="encoder.conv{1,2}.weight *.block.*.conv{1,2}.weight *.conv_t1.weight decoder.conv1.weight \
            *.quantizers.?.{in,out}_proj.weight",
        embedding="*.codebook.weight",
        single="decoder.conv2.weight",
        other="*.alpha",
    ),
    "vits": Row(
        "VitsModel",
        "VitsConfig",
        ONE,
        orthogonalized="*.attention.{q,k,v,out}_proj.weight *.feed_forward.conv_{1,2}.weight \
            text_encoder.project.weight \
            flow.flows.?.conv_{pre,post}.weight *.parametrizations.weight.original1 decoder.conv_pre.weight \
            decoder.upsampler.?.weight decoder.resblocks.*.weight duration_predictor.conv_{pre,proj}.weight \
            *.convs_pointwise.?.weight duration_predictor.*flows.?.conv_proj.weight \
            duration_predictor.post_conv_proj.weight posterior_encoder.conv_{pre,proj}.weight",
        embedding="text_encoder.embed_tokens.weight",
        grouped="*.convs_dilated.?.weight",
        single="decoder.conv_post.weight duration_predictor.*flows.?.conv_pre.weight \
            duration_predictor.post_conv_pre.weight",
        other=f"{MAGNITUDE} *.emb_rel_{{k,v}} *.translate *.log_scale",
    ),
    "whisper": Row(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"encoder_layers": 1, "decoder_layers": 1},
        orthogonalized=f"{BART} model.encoder.conv{{1,2}}.weight",
        embedding="*.embed_{positions,tokens}.weight",
    ),
    "audio spectrogram transformer": Row(
        "ASTForAudioClassification",
        "ASTConfig",
        ONE,
        orthogonalized=VIT,
        head="classifier.dense.weight",
        other="*.{cls_token,distillation_token,position_embeddings}",
    ),
    # --- several modalities ------------------------------------------------------------------------------------------
    "clip": Row(
        "CLIPModel",
        "CLIPConfig",
        ONE_TOWER,
        orthogonalized=f"{CLIP} {{visual,text}}_projection.weight",
        embedding=CLIP_TABLES,
    ),
    "siglip": Row(  # its "head" is attention pooling of images and a projection of texts
        "SiglipModel",
        "SiglipConfig",
        ONE_TOWER,
        orthogonalized=f"{CLIP} text_model.head.weight vision_model.head.attention.in_proj_weight \
            vision_model.head.attention.out_proj.weight",
        embedding=CLIP_TABLES,
        other="vision_model.head.probe",
    ),
    "blip2": Row(
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        {**ONE_TOWER, "qformer_config": ONE},
        orthogonalized="vision_model.*.{qkv,projection,fc1,fc2,patch_embedding}.weight \
            qformer.*.{query,key,value,dense}.weight \
            language_projection.weight language_model.*.{q,k,v,out}_proj.weight language_model.*.fc{1,2}.weight",
        embedding="*.embed_{tokens,positions}.weight",
        other="query_tokens *.class_embedding *.position_embedding",
    ),
    "llava": Row(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"vision_config": {"model_type": "clip_vision_model", **ONE}, "text_config": {"model_type": "llama", **ONE}},
        orthogonalized="*.vision_tower.*.self_attn.{q,k,v,out}_proj.weight *.mlp.fc{1,2}.weight \
            *.patch_embedding.weight \
            *.multi_modal_projector.linear_{1,2}.weight *.language_model.*.self_attn.{q,k,v,o}_proj.weight \
            *.language_model.*.mlp.{gate,up,down}_proj.weight",
        embedding="*.embed_tokens.weight *.position_embedding.weight",
        head="lm_head.weight",
    ),
    "idefics2": Row(
        "Idefics2ForConditionalGeneration",
        "Idefics2Config",
        {"vision_config": ONE, "text_config": {"model_type": "mistral", **ONE}},
        orthogonalized="*.self_attn.{q,k,v,o,out}_proj.weight *.mlp.fc{1,2}.weight *.patch_embedding.weight \
            *.{gate,up,down}_proj.weight",
        embedding="*.embed_tokens.weight *.position_embedding.weight",
        head="lm_head.weight",
        other="*.perceiver_resampler.latents",
    ),
    "gemma3": Row(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": ONE, "vision_config": {"model_type": "siglip_vision_model", **ONE}},
        orthogonalized="*.self_attn.{q,k,v,o,out}_proj.weight *.fc{1,2}.weight *.patch_embedding.weight \
            *.mlp.{gate,up,down}_proj.weight *.head.attention.in_proj_weight *.head.attention.out_proj.weight \
            *.mm_input_projection_weight",
        embedding="*.embed_tokens.weight *.position_embedding.weight",
        other="*.head.probe",
    ),
    "perceiver for classification": Row(
        "PerceiverForSequenceClassification",
        "PerceiverConfig",
        {"num_self_attends_per_block": 1},
        orthogonalized="*.attention.self.{query,key,value}.weight *.attention.output.dense.weight \
            *.mlp.dense{1,2}.weight",
        embedding="*.input_preprocessor.{embeddings,position_embeddings}.weight",
        head="*.decoder.final_layer.weight",
        other="*.latents *.output_position_encodings.position_embeddings",
    ),
    "x-clip": Row(
        "XCLIPModel",
        "XCLIPConfig",
        {"text_config": ONE, "vision_config": {**ONE, "mit_num_hidden_layers": 1}},
        orthogonalized=f"{CLIP} {{visual,text}}_projection.weight prompts_visual_projection *.message_fc.weight \
            *.message_attn.{{q,k,v,out}}_proj.weight *.cross_attn.{{q_proj,k_proj,v_proj,proj}}.weight \
            *.mlp.{{0,3}}.weight",
        embedding=CLIP_TABLES,
        other="mit.position_embedding",
    ),
    "flava": Row(
        "FlavaModel",
        "FlavaConfig",
        {"text_config": ONE, "image_config": ONE, "multimodal_config": ONE},
        orthogonalized="*.attention.attention.{query,key,value}.weight *.dense.weight \
            *.patch_embeddings.projection.weight \
            {image,text,image_to_mm,text_to_mm}_projection.weight",
        embedding="*.{word,token_type}_embeddings.weight text_model.*.position_embeddings.weight",
        other="*.cls_token *.mask_token image_model.embeddings.position_embeddings",
    ),
    # --- series and decisions ----------------------------------------------------------------------------------------
    "patchtst for classification": Row(
        "PatchTSTForClassification",
        "PatchTSTConfig",
        {**ONE, "num_targets": 3, "num_input_channels": 4},
        orthogonalized="*.self_attn.{q,k,v,out}_proj.weight *.ff.{0,3}.weight",
        head="head.linear.weight",
        single="*.input_embedding.weight",  # positions are frozen
    ),
    "decision transformer": Row(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        {"n_layer": 1},
        orthogonalized="*.attn.c_{attn,proj}.weight *.mlp.c_{fc,proj}.weight embed_{state,action}.weight",
        embedding="encoder.w{t,p}e.weight embed_timestep.weight",
        head="predict_{state,return}.weight predict_action.0.weight",
        single="embed_return.weight",
    ),
}


def alternatives(pattern: str) -> list[str]:
    """Expand a pattern with braces."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    return [
        expanded
        for choice in found[1].split(",")
        for expanded in alternatives(pattern[: found.start()] + choice + pattern[found.end() :])
    ]


def build(row: Row) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, row.name)(getattr(transformers, row.config)(**row.settings))


def cell_of(reason: str | None) -> str:
    """Return the cell that a reason belongs to."""
    known = {
        None: "orthogonalized",
        "embedding": "embedding",
        "head": "head",
        "depthwise or grouped convolution": "grouped",
        "a single row or column": "single",
        "adapters of several experts": "other",
        "part of a parametrized weight": "other",
    }
    return known.get(reason) or ("other" if reason.endswith("is not known to multiply activations with it") else reason)


def check(model: nn.Module, cells: Mapping[str, str]) -> None:
    """Check that every parameter of two or more dimensions is in its cell, and every pattern matches one."""
    reasons = matrix_layouts.left_out(model)
    patterns = {(cell, one) for cell, text in cells.items() for whole in text.split() for one in alternatives(whole)}
    used, wrong = set(), []
    for name, param in model.named_parameters():
        if not param.requires_grad or len(param.shape) < 2:
            continue
        matched = {(cell, pattern) for cell, pattern in patterns if fnmatch.fnmatchcase(name, pattern)}
        used |= matched
        expected, found = {cell for cell, _ in matched}, cell_of(reasons.get(name))
        if expected != {found}:
            wrong.append(f"{name} {tuple(param.shape)}: {found}, expected {expected or 'nothing'}")
    assert not wrong, "\n".join(wrong)
    assert used == patterns, f"idle patterns: {sorted(patterns - used)}"


def test_the_table_is_long_enough():
    assert len({row.config for row in TABLE.values()}) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
def test_weights_are_orthogonalized_and_nothing_else(row):
    cells = ("orthogonalized", "embedding", "head", "grouped", "single", "other")
    check(build(row), {cell: getattr(row, cell) for cell in cells})


# What counts as one matrix, and its output dimension, where a module's type does not show it

MATRICES = {
    "xlnet for classification": {"*.rel_attn.?": [(1024, 1024)]},
    "funnel for classification": {"*.r_kernel": [(768, 768)]},
    "mixtral": {
        "*.gate_up_proj": [(8, 14336, 4096)] * 2,
        "*.experts.down_proj": [(8, 4096, 14336)],
        "*.mlp.gate.weight": [(8, 4096)],
    },
    "gpt-oss": {"*.gate_up_proj": [(128, 2880, 2880)] * 2, "*.down_proj": [(128, 2880, 2880)]},
    "llama4": {"*.gate_up_proj": [(16, 8192, 5120)] * 2, "*.experts.down_proj": [(16, 5120, 8192)]},
    "jetmoe": {
        "*.mlp.input_linear.weight": [(8, 11264, 2048)],
        "*.mlp.output_linear.weight": [(8, 2048, 5632)],
    },
    "nemotron-h": {"*.experts.up_proj": [(8, 7688, 4096)], "*.experts.down_proj": [(8, 4096, 7688)]},
    "dbrx": {"*.experts.mlp.[wv]1": [(3, 40, 32)], "*.experts.mlp.w2": [(3, 32, 40)]},
    "deepseek-v4": {"*.o_a_proj.weight": [(8, 1024, 4096)], "*_hc.fn": [(24, 16384)]},
    "zamba": {"*.x_proj_weight": [(2, 264, 3712)], "*.dt_proj_weight": [(2, 3712, 232)]},
    "recurrent-gemma": {"*_gate_weight": [(10, 256, 256)]},
    "gemma3": {"*.mm_input_projection_weight": [(2304, 768)], "*.in_proj_weight": [(768, 768)] * 3},
    "x-clip": {"prompts_visual_projection": [(512, 768)]},
    "vits": {
        "flow.flows.0.wavenet.in_layers.0.parametrizations.weight.original1": [(384, 960)],
        "decoder.upsampler.0.weight": [(256, 8192)],
    },
    "wavlm for speakers": {"wavlm.feature_extractor.conv_layers.0.conv.weight": [(512, 10)]},
}


@pytest.mark.parametrize("row", MATRICES)
def test_matrices_are_those_that_the_code_multiplies_with(row):
    model = build(TABLE[row])
    found = matrix_layouts.of_model(model)
    for pattern, expected in MATRICES[row].items():
        names = fnmatch.filter(found, pattern)
        assert names
        for name in names:
            assert matrix_layouts.matrix_shapes(model.get_parameter(name).shape, found[name]) == expected


def test_stacked_experts_do_what_they_are_taken_for():
    row = TABLE["dbrx"]
    model = getattr(transformers, row.name)(getattr(transformers, row.config)(**row.settings)).eval()
    experts = model.transformer.blocks[0].ffn.experts
    found = matrix_layouts.of_model(model)
    inputs, chosen = torch.randn(5, 32), torch.tensor([[0], [2], [1], [2], [0]])
    names = {leaf: f"transformer.blocks.0.ffn.experts.mlp.{leaf}" for leaf in ("w1", "v1", "w2")}
    stacks = {leaf: matrix_layouts.split(model.get_parameter(name), found[name])[0] for leaf, name in names.items()}
    outputs = experts(inputs, chosen, torch.ones(5, 1))
    for token, (expert,) in enumerate(chosen.tolist()):
        gate, up, down = (stacks[leaf][expert] for leaf in ("w1", "v1", "w2"))
        expected = down @ (nn.functional.silu(gate @ inputs[token]) * (up @ inputs[token]))
        torch.testing.assert_close(outputs.flatten(0, -2)[token], expected, rtol=1e-4, atol=1e-6)


def test_xlnet_reads_its_projections_as_one_square_matrix_each():
    model = transformers.XLNetModel(transformers.XLNetConfig(d_model=12, n_head=3, d_inner=8, n_layer=1, vocab_size=9))
    attention = model.layer[0].rel_attn
    found = matrix_layouts.of_model(model)
    hidden = torch.randn(4, 1, 12)
    for leaf in "qkvr":
        (matrix,) = matrix_layouts.split(getattr(attention, leaf), found[f"layer.0.rel_attn.{leaf}"])
        expected = torch.einsum("ibh,hnd->ibnd", hidden, getattr(attention, leaf)).flatten(2)
        torch.testing.assert_close(hidden @ matrix, expected)
    (matrix,) = matrix_layouts.split(attention.o, found["layer.0.rel_attn.o"])
    heads = torch.randn(4, 1, 3, 4)
    expected = torch.einsum("ibnd,hnd->ibh", heads, attention.o)
    torch.testing.assert_close(heads.flatten(2) @ matrix.T, expected)


# PEFT

LLAMA_CONFIG = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
}


def llama(**settings) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA_CONFIG, **settings}))


def peft_model(model: nn.Module, config: str, **settings) -> nn.Module:
    import peft

    return peft.get_peft_model(model, getattr(peft, config)(**settings))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(8, 4))


ADAPTERS = {
    "lora": (
        llama,
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
        {"orthogonalized": "*.lora_{A,B}.default.weight", "embedding": "*.embed_tokens.lora_embedding_{A,B}.default"},
    ),
    "lora of rank one": (
        llama,
        "LoraConfig",
        {"r": 1, "target_modules": ["q_proj"]},
        {"single": "*.lora_{A,B}.default.weight"},
    ),
    "lora with modules to save": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA_CONFIG, num_labels=3)),
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"},
        {"orthogonalized": "*.lora_{A,B}.default.weight", "head": "*.score.modules_to_save.default.weight"},
    ),
    "lora of the head": (
        llama,
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj", "lm_head"]},
        {"orthogonalized": "*.q_proj.lora_{A,B}.default.weight", "head": "*.lm_head.lora_{A,B}.default.weight"},
    ),
    "dora": (
        convolution,
        "LoraConfig",
        {"r": 4, "target_modules": ["0", "3"], "use_dora": True},
        {"orthogonalized": "*.lora_{A,B}.default.weight", "other": "*.lora_magnitude_vector.default.weight"},
    ),
    "lora of experts": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA_CONFIG, num_local_experts=3)),
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
        {"orthogonalized": "*.q_proj.lora_{A,B}.default.weight", "other": "*.experts.lora_{A,B}.default.weight"},
    ),
    "trainable tokens": (
        llama,
        "TrainableTokensConfig",
        {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
        {"embedding": "*.trainable_tokens_delta.default"},
    ),
    "ia3": (
        llama,
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {"other": "*.ia3_l.default"},
    ),
    "adalora": (
        llama,
        "AdaLoraConfig",
        {"target_modules": ["q_proj"], "init_r": 4, "total_step": 10},
        {"other": "*.lora_{A,B,E}.default"},
    ),
    "loha": (
        llama,
        "LoHaConfig",
        {"r": 4, "target_modules": ["q_proj"]},
        {"other": "*.hada_w{1,2}_{a,b}.default"},
    ),
    "oft": (
        llama,
        "OFTConfig",
        {"oft_block_size": 8, "target_modules": ["q_proj"]},
        {"other": "*.oft_R.default.weight"},
    ),
    "prompt tuning": (
        llama,
        "PromptTuningConfig",
        {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
        {"embedding": "prompt_encoder.default.embedding.weight"},
    ),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter):
    make, config, settings, cells = ADAPTERS[adapter]
    check(peft_model(make(), config, **settings), cells)
