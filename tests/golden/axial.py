"""The numbers of tests/zoo/test_golden.py, from the authors' code (github.com/google-research/google-research):

    pip install tensorflow-cpu==2.21.0
    python tests/golden/axial.py DIR     # with DIR/axial/nn.py and DIR/axial/transformers.py

taken at commits 0c1bbe5fc971a1de1a427debc814e66ab4f1e7fa (nn.py) and 066e6a12a3817e45919458090102abfc0a09d287
(transformers.py). The code is TensorFlow 1 in float32: it is loaded with TensorFlow 2's compatibility module for that,
and with float64 in the place of float32.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden.rule import digest, draw, weight

CASES = {"grey": 1, "colour": 3}  # channels
BATCH, HEIGHT, WIDTH, LEVELS, DIM, HEADS, EXTERIOR, OUTER, INNER = 2, 5, 7, 256, 12, 3, 2, 4, 2
SHARED = {
    "img_height": HEIGHT, "img_width": WIDTH, "num_embs": LEVELS, "emb_dim": DIM, "emb_init_scale": 5.0,
    "num_heads": HEADS, "hdim_factor": 1, "res_init_scale": 1.0, "num_outer_layers": OUTER, "num_inner_layers": INNER,
}  # fmt: skip


def image(case: str) -> np.ndarray:
    """Values from 0 to 255, (b c h w)."""
    return np.clip(draw(case, BATCH, CASES[case], HEIGHT, WIDTH) * 64 + 128, 0, LEVELS - 1).astype(np.int32)


def numbers(directory: str, case: str) -> dict[str, list[float]]:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    tf.reset_default_graph()
    tf.Module._scope_name = property(lambda module: module.name_scope.name)  # as TensorFlow 1 had it
    package = types.ModuleType("axial")
    package.utils = types.ModuleType("axial.utils")  # for sampling and training alone
    sys.modules |= {"axial": package, "axial.utils": package.utils}
    for name in ("nn", "transformers"):
        text = Path(directory, "axial", f"{name}.py").read_text().replace("tf.float32", "tf.float64")
        text = text.replace("import tensorflow as tf", "import tensorflow.compat.v1 as tf")
        code = types.ModuleType(f"axial.{name}")
        code.__package__ = "axial"
        sys.modules[f"axial.{name}"] = code
        exec(text, vars(code))
        setattr(package, name, code)

    pixels, shape = image(case), {"img_channels": 3, "num_exterior_layers": EXTERIOR}
    with tf.variable_scope("", dtype=tf.float64):
        if case == "grey":
            model = package.transformers.Transformer2d(name="model", **SHARED)
            logits = model.compute_logits(tf.constant(pixels[:, 0]), cond=None, dropout=0.0)[:, None]
        else:
            model = package.transformers.Transformer3d(name="model", **SHARED, **shape)
            logits = model.compute_logits(tf.constant(pixels.transpose(0, 2, 3, 1)), cond=None, dropout=0.0)
            logits = tf.transpose(logits, [0, 3, 1, 2, 4])
    variables = {v.name.removesuffix(":0"): v for v in tf.trainable_variables()}
    grads = tf.gradients(logits, [*variables.values()], tf.constant(draw("gradient", *logits.shape)))
    with tf.Session() as session:
        for name, variable in variables.items():
            variable.load(initial(name, *variable.shape), session)
        out, *grads = session.run([logits, *grads])
    grads = [g if isinstance(g, np.ndarray) else scattered(g, v) for g, v in zip(grads, variables.values())]
    return {"logits": digest("logits", out)} | {n: digest(n, g) for n, g in zip(variables, grads)}


def initial(name: str, *shape: int) -> np.ndarray:
    """A variable of the authors' code: layers of theirs have their inputs first, and norms' scales are about 1."""
    if name.endswith("/g"):
        return 1 + weight(name, *shape)
    if name.endswith("/w"):
        return draw(name, *shape) * np.prod(shape[:-1]) ** -0.5
    return weight(name, *shape)


def scattered(grad: object, variable: object) -> np.ndarray:
    """The gradient of a lookup, which TensorFlow gives row by row."""
    whole = np.zeros(variable.shape)
    np.add.at(whole, grad.indices, grad.values)
    return whole


if __name__ == "__main__":
    print(json.dumps({case: numbers(sys.argv[1], case) for case in CASES}, separators=(",", ":")))
