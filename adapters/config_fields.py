"""Every field of `adapter_config.json` that PEFT or a trainer is known to write, and what it means for serving.

Three tables: fields that change nothing at inference, fields that change the maths in a way that is not served (with
the reason and the remedy), and other PEFT kinds. Used by `spec` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

# Read by `spec` itself.
READ_FIELDS = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
        "layers_pattern", "rank_pattern", "alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights",
        "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "ensure_weight_tying",
    }
)  # fmt: skip

# Whatever their value, these do not change what a trained adapter computes.
INERT_FIELDS = frozenset(
    {
        # PEFT's own book-keeping, dropout (training only) and helpers of initialisations that leave the base alone
        "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "runtime_config",
        "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size",
        # says how the base stores its weights, not the adapter its halves
        "fan_in_fan_out",
        # changes the backward pass alone
        "velora_config",
        # written by other trainers or by very old PEFT: precision and learning rates of training
        "merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "unsloth_fixed", "loraplus_lr_ratio",
        "loraplus_lr_embedding", "mora_type",
    }
)  # fmt: skip

# Known fields that change the maths: refused unless null, false or empty.
REFUSED_FIELDS: Mapping[str, str] = {
    "target_parameters": (
        "LoRA on bare parameters (target_parameters, as for MoE experts) is not served; train with target_modules only"
    ),
    "layer_replication": (
        "layer_replication builds a deeper model than the one that is served; merge the adapter and serve that model"
    ),
    "alora_invocation_tokens": (
        "activated LoRA (alora_invocation_tokens), which switches on in the middle of a prompt, is not served; train a "
        "plain LoRA"
    ),
    "use_qalora": "QALoRA (use_qalora), which pools its input, is not served; train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA (use_bdlora) is not served; train a plain LoRA",
    "arrow_config": "Arrow routing between adapters (arrow_config) is not served; serve the adapters one by one",
    "kasa_config": "KaSA (kasa_config) changes the base weights and is not served; train a plain LoRA",
    "monteclora_config": "MonteCLoRA (monteclora_config) is not served; train a plain LoRA",
    "megatron_config": "Megatron layers (megatron_config) are not served; export the adapter as a plain PEFT LoRA",
    "use_mora": "MoRA (use_mora), a square matrix in place of two thin ones, is not served; train a plain LoRA",
    "enable_lora": "merged q/k/v LoRA of old PEFT versions (enable_lora) is not served; re-save with a current PEFT",
}

# Initialisations that leave the base weights as they are.
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# Initialisations that also change the base weights, so that the adapter fits only that changed base.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

# PEFT kinds with `convert_to_lora` support (PEFT 0.19 and later).
CONVERTIBLE_KINDS = frozenset(
    {
        "LOHA", "LOKR", "VERA", "VBLORA", "UNILORA", "TINYLORA", "FOURIERFT", "PSOFT", "RANDLORA", "C3A",
        "MISS", "GRALORA", "DELORA", "WAVEFT",
    }
)  # fmt: skip

# PEFT kinds that put something beside the weights instead of changing them: neither convertible nor mergeable.
PROMPT_KINDS = frozenset(
    {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE"}
)
