from worker.families.family import Experts, Family
from worker.families.mamba import mamba_of
from worker.families.parts import ATTENTION, DENSE, WITH_BIASES
from worker.families.roles import Roles

_MAMBA: Roles = {
    "mamba.in_proj": "mamba",
    "mamba.conv1d": "mamba",
    "mamba.A_log": "colwise",
    "mamba.D": "colwise",
    "mamba.dt_bias": "colwise",
    "mamba.norm": "colwise",
    "mamba.out_proj": "rowwise",
}
_FEED_FORWARD: Roles = {
    "shared_mlp.input_linear": "halves",
    "shared_mlp.output_linear": "rowwise",
    "block_sparse_moe.experts": "experts",
}

FAMILIES = [
    Family(
        "granite",
        DENSE,
        (
            *WITH_BIASES,
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        ),
    ),
    Family(
        "granitemoehybrid",
        {**ATTENTION, **_MAMBA, **_FEED_FORWARD},
        experts=Experts(
            (
                "block_sparse_moe.experts.{}.gate_proj.weight",
                "block_sparse_moe.experts.{}.up_proj.weight",
                "block_sparse_moe.experts.{}.down_proj.weight",
            ),
            count="num_local_experts",
            may_lack=True,
            stored_above=("input_linear.weight", "output_linear.weight"),
        ),
        recurrent=mamba_of,
        stored_names=((".router.", ".router.layer."),),
    ),
]
