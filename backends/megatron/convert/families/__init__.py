"""The families that we convert. A new one is a table of its own and a line here."""

from __future__ import annotations

from backends.megatron.convert.families.deepseek_v3 import DEEPSEEK_V3
from backends.megatron.convert.families.llama import LLAMA
from backends.megatron.convert.families.mixtral import MIXTRAL
from backends.megatron.convert.families.qwen2 import QWEN2
from backends.megatron.convert.families.qwen2_moe import QWEN2_MOE
from backends.megatron.convert.families.qwen3 import QWEN3
from backends.megatron.convert.families.qwen3_moe import QWEN3_MOE
from backends.megatron.convert.table import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3)
}
