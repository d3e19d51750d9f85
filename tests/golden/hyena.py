"""Make the golden vectors of StripedHyena 2 in this folder: `python tests/golden/hyena.py`.

It needs vortex, the implementation of the authors of Evo 2 (Apache-2.0), on no GPU: `pip install
--no-deps vtx==1.1.0 einops==0.8.1`. Its CUDA modules, which the convolutions do not need, are
replaced by empty ones, and its fused rotation by its own readable one.
"""

import json
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import torch
from reduce import sorted_header
from safetensors.torch import save

HERE = Path(__file__).parent
SETTINGS = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_filters": 16,
    "num_layers": 5,
    "num_attention_heads": 2,
    **{
        "hcs_layer_idxs": [0, 4],
        "hcm_layer_idxs": [1],
        "hcl_layer_idxs": [2],
        "attn_layer_idxs": [3],
    },
    "hcs_filter_length": 7,
    "hcm_filter_length": 128,
    "hcs_filter_groups": 4,
    "hcm_filter_groups": 4,
    "hcl_filter_groups": 16,
    "short_filter_length": 3,
    "short_filter_bias": False,
    "state_size": 4,
    "inner_mlp_size": 24,
    "inner_size_multiple_of": 8,
    "mlp_activation": "gelu",
    "evo2_style_activations": True,
    "eps": 1e-6,
    "rotary_emb_base": 10000,
    "proj_groups": 1,
    "qkv_proj_bias": False,
    "tie_embeddings": True,
    "mha_out_proj_bias": True,
    "hyena_out_proj_bias": True,
    "hyena_flip_x1x2": False,
    "interleave": True,
    "column_split": True,
    "column_split_hyena": False,
    "final_norm": True,
    "max_seqlen": 256,
    "model_parallel_size": 1,
}
"""As the configuration files of Evo 2 have them, for a small model."""
RUNTIME = {
    "use_fp8_input_projections": False,
    "use_flash_attn": False,
    "use_flashfft": False,
    "prefill_style": "fft",
    **{f"{part}_dtype": torch.float32 for part in ("params", "attn_block", "hyena_block", "mlp")},
}
TOKENS = (2, 150)


def vortex_on_a_cpu() -> types.ModuleType:
    """vortex's module of models."""
    torch.cuda.device = lambda *_: nullcontext()  # vortex enters it on a CPU, too
    # its Linear needs a GPU; vortex then takes one of its own
    sys.modules["transformer_engine"] = None
    names = {"vortex.ops.embedding.rotary": ("apply_rotary",)}
    for name in (
        "flash_attn_2_cuda",
        "vortex.ops",
        "vortex.ops.embedding",
        *names,
        "vortex.ops.attn_interface",
    ):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        for each in names.get(name, ()):
            setattr(module, each, None)
    from vortex.model import model, rotary

    def rotate(self, qkv, seqlen_offset=0, max_seqlen=None):
        self._update_cos_sin_cache(qkv.shape[1], device=qkv.device, dtype=qkv.dtype)
        turned = [
            rotary.apply_rotary_emb_torch(x, self._cos_cached, self._sin_cached)
            for x in qkv.unbind(2)[:2]
        ]
        return torch.stack([*turned, qkv[:, :, 2]], 2)

    rotary.RotaryEmbedding.forward = rotate
    return model


def published(name: str, each: torch.Tensor) -> torch.Tensor:
    """As checkpoints hold it: the rows of attention's q, k and v head by head, which vortex sorts
    as it loads them.
    """
    if not name.endswith("Wqkv.weight"):
        return each
    heads = SETTINGS["num_attention_heads"]
    return each.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def main() -> None:
    vortex = vortex_on_a_cpu()
    from vortex.model.utils import dotdict

    torch.manual_seed(0)
    model = vortex.StripedHyena(dotdict(SETTINGS | RUNTIME)).float()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("log_poles"):
                each.copy_(-torch.rand_like(each))
            elif name.endswith(("residues", "filter.h")):
                each.div_(each.shape[-1] ** 0.5)
            elif each.dim() == 1:  # norms, biases, filter.D: none is 0 or 1 alone
                each.add_(torch.randn_like(each) * 0.3)
            elif not name.endswith("short_filter_weight"):
                each.copy_(torch.randn_like(each) * 0.3 * each.shape[-1] ** -0.5)
    drawn = {name: each.clone() for name, each in model.state_dict().items()}
    weights = {name: published(name, each) for name, each in drawn.items()}
    model.custom_load_state_dict(weights)
    assert all(torch.equal(each, drawn[name]) for name, each in model.state_dict().items())
    tokens = torch.randint(0, SETTINGS["vocab_size"], TOKENS)
    logits = model(tokens)[0]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {f"weight.{name}": each for name, each in weights.items()}
    found |= {
        f"gradient.{name}": published(name, each.grad) for name, each in model.named_parameters()
    }
    found |= {"tokens": tokens, "logits": logits.detach()}
    found = {name: each.contiguous() for name, each in found.items()}
    file = HERE / "hyena.safetensors"
    file.write_bytes(sorted_header(save(found, {"config": json.dumps(SETTINGS)}), found))
    print(f"{file.name}: {file.stat().st_size:,} bytes, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
