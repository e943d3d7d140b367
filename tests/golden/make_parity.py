"""Write parity.json: what transformers computes for the cases of tests/models/cases.py. Needs torch.

pip install torch==2.13.0 && python tests/golden/make_parity.py
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "models"), str(HERE.parent.parent)]
COLUMNS = [0, 5, 10, 11]  # of each row; all of them would say no more


def main():
    import torch
    import transformers
    from cases import CASES
    from reference import reference

    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            logits, loss, grads = reference(case, directory)
        norms = {name: float(np.linalg.norm(grad)) for name, grad in sorted(grads.items())}
        found[case] = {
            "logits": np.round(logits[:, COLUMNS].astype(np.float64), 6).tolist(),
            "loss": round(loss, 7),
            "gradient_norm": float(f"{np.linalg.norm(list(norms.values())):.7g}"),
        }
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__, "columns": COLUMNS}
    (HERE / "parity.json").write_text(json.dumps({**made_by, "cases": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
