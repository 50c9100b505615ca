"""Describe how to serve an exported chat model: a README, and a Modelfile for ollama."""

from megatoken.text.chat_template import BUILT_IN, ChatTemplate

# The conversation in Go's template language, for ollama.
_GO_TEMPLATES = {
    "chatml": "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n",
    "llama-3": "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
    "{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n",
}
GGUF = "model.gguf"
TRAINING_TEMPLATE = "chat_template_training.jinja"
_TRAINING = f"""
{TRAINING_TEMPLATE} is the template with the tags that `apply_chat_template(..., return_assistant_tokens_mask=True)`
and trl's `assistant_only_loss` need; plain jinja2 rejects them.
"""


def describe_chat(template: ChatTemplate) -> dict[str, str]:
    """Return the contents of README.md and TRAINING_TEMPLATE in an hf export, by file name.

    The model's own template has no TRAINING_TEMPLATE.
    """
    readme = _describe(template, "vllm serve .")
    if template.name not in BUILT_IN:
        return {"README.md": readme}
    return {"README.md": readme + _TRAINING, TRAINING_TEMPLATE: template.jinja}


def describe_gguf(template: ChatTemplate) -> dict[str, str]:
    """Return the contents of ollama's Modelfile and README.md in a GGUF export, by file name."""
    lines = [f"FROM ./{GGUF}"]
    if template.name in _GO_TEMPLATES:  # ollama has no jinja
        lines.append(f'TEMPLATE """{_GO_TEMPLATES[template.name]}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in _list_stops(template)]
    serve = f"ollama create mine -f Modelfile && ollama run mine\nllama-server --jinja -m {GGUF}"
    return {"Modelfile": "\n".join(lines) + "\n", "README.md": _describe(template, serve)}


def _list_stops(template: ChatTemplate) -> list[str]:
    return [template.tokenizer.decode([id]) for id in template.stop_ids]


def _describe(template: ChatTemplate, commands: str) -> str:
    stops = _list_stops(template)
    ends = " and ".join(f"`{stop}`" for stop in stops)
    return f"""\
# A chat model

The chat template, {template.name}, and the tokens that end an answer, {ends}, are in the model's files.
To serve it, in this folder:

```
{commands}
```

**A user's message can imitate the template.** transformers, vLLM, llama.cpp and ollama render a conversation as
one text and parse control tokens anywhere in it: a message that contains `{stops[0]}` ends itself, and the text after
it can pose as the system or the assistant. If you do not trust your users, remove such strings from their messages
before they reach the server. `megatoken chat` and `megatoken serve` take control tokens from the template alone.
"""
