"""The numbers of tests/zoo/test_golden.py, from the authors' code (github.com/Vchitect/Latte):

    git clone https://github.com/Vchitect/Latte && git -C Latte checkout b27c24a17487e3c33ae4e92364521303d0f14845
    python tests/golden/latte.py Latte

It needs no timm: two stand-ins below are all that the model takes from it. Attention is the code's ``math`` path.
"""

import json
import sys
import types
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden.rule import digest, draw, weight

CASES = {"none": 1, "class": 2}  # and what the authors' ``extras`` is then
GRADIENTS = [  # of these parameters, and of the input
    "x_embedder.proj.weight",
    "t_embedder.mlp.0.weight",
    "blocks.0.adaLN_modulation.1.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.1.attn.qkv.bias",
    "blocks.3.attn.proj.weight",
    "blocks.3.mlp.fc1.weight",
    "final_layer.linear.weight",
]
FRAMES, SIDE, CHANNELS, WIDTH, HEADS, DEPTH, CLASSES = 5, 8, 3, 48, 4, 4, 6
TIMESTEP, LABEL = (3, 870), (2, 6)  # 6 is the null class


class PatchEmbed(nn.Module):
    def __init__(self, size, patch, channels, dim, bias):
        super().__init__()
        self.patch_size, self.num_patches = (patch, patch), (size // patch) ** 2
        self.proj = nn.Conv2d(channels, dim, patch, patch, bias=bias)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features, act_layer, drop):
        super().__init__()
        self.fc1, self.act = nn.Linear(in_features, hidden_features), act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def numbers(checkout: str, case: str) -> dict[str, list[float]]:
    timm = types.ModuleType("timm.models.vision_transformer")
    timm.Mlp, timm.PatchEmbed = Mlp, PatchEmbed
    sys.modules["timm.models.vision_transformer"] = timm
    code = types.ModuleType("latte")
    text = Path(checkout, "models/latte.py").read_text()
    # its timestep frequencies are made in float32, whose exponential is not the same on every CPU
    for there, here in (("dtype=torch.float32) / half", "dtype=torch.float64) / half"), ("].float()", "].double()")):
        assert text.count(there) == 1
        text = text.replace(there, here)
    exec(text, vars(code))
    model = code.Latte(
        input_size=SIDE, patch_size=2, in_channels=CHANNELS, hidden_size=WIDTH, depth=DEPTH, num_heads=HEADS,
        num_frames=FRAMES, num_classes=CLASSES, extras=CASES[case], attention_mode="math",
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name not in ("pos_embed", "temp_embed"):
                param.copy_(torch.from_numpy(weight(name, *param.shape)))
    x = torch.from_numpy(draw("x", 2, FRAMES, CHANNELS, SIDE, SIDE)).requires_grad_()
    labels = {"y": torch.tensor(LABEL)} if case == "class" else {}
    out = model(x, torch.tensor(TIMESTEP), **labels)
    out.backward(torch.from_numpy(draw("gradient", *out.shape)))
    found = {"output": digest("output", out.detach().numpy()), "x": digest("x", x.grad.numpy())}
    grads = [*GRADIENTS, *(["y_embedder.embedding_table.weight"] if case == "class" else [])]
    return found | {name: digest(name, model.get_parameter(name).grad.numpy()) for name in grads}


if __name__ == "__main__":
    print(json.dumps({case: numbers(sys.argv[1], case) for case in CASES}, separators=(",", ":")))
