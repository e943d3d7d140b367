"""What transformers computes for `cases`: logits, a loss and its gradients, in f32 on a CPU. Needs torch."""

import json
from pathlib import Path

import numpy as np
from cases import config_of, tokens_of, weights_of
from safetensors.numpy import save_file

from agentrl_jax.models.families import family_of


def reference(case, directory):
    """(logits f32[2, T, V], loss, gradients by Hugging Face name). The checkpoint is written to `directory`.

    The loss is the mean of -log p(next token) over the first T - 1 columns. transformers reads
    attn_logit_softcapping but does not pass it on; it is handed in here.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config, directory = config_of(case), Path(directory)
    raw = family_of(config.model_type).config_to_json(config)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(weights_of(case), directory / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    problems = {name: found for name, found in report.items() if found}
    assert not problems, problems
    model.eval()
    tokens = torch.from_numpy(tokens_of(case).astype(np.int64))
    cap = {} if config.attention_soft_cap is None else {"softcap": config.attention_soft_cap}
    logits = model(tokens, use_cache=False, **cap).logits
    scored = torch.log_softmax(logits[:, :-1], dim=-1)
    loss = -scored.gather(2, tokens[:, 1:, None]).mean()
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), dict(_separate(grads))


def _separate(grads):
    """transformers stacks the experts of a layer, and fuses their gate and up."""
    for name, grad in grads.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj" and prefix.endswith("experts"):
            for expert, both in enumerate(grad):
                gate, up = np.split(both, 2)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif last == "down_proj" and prefix.endswith("experts"):
            yield from ((f"{prefix}.{expert}.down_proj.weight", one) for expert, one in enumerate(grad))
        else:
            yield name, grad
