"""Write a README on how to serve an exported chat model, and a Modelfile for ollama."""

from megatoken.data.chat_template import ChatTemplate

# The conversation in Go's template language, for ollama.
_GO_TEMPLATES = {
    "chatml": "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n",
    "llama-3": "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
    "{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n",
}
GGUF = "model.gguf"
TRAINING_TEMPLATE = "chat_template_training.jinja"


def drop_marks(template: ChatTemplate) -> str:
    """Return the template without {% generation %} tags, which plain jinja2 rejects."""
    return template.jinja.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def describe_chat(template: ChatTemplate, model_type: str) -> dict[str, str]:
    """Return the contents of Modelfile, README.md and TRAINING_TEMPLATE, by file name."""
    stops = [template.tokenizer.decode([id]) for id in template.stop_ids]
    lines = ["FROM ."]  # ollama imports only LLaMA's safetensors
    convert = ""
    if model_type != "llama":
        lines = [f"FROM ./{GGUF}"]
        convert = f"python llama.cpp/convert_hf_to_gguf.py . --outfile {GGUF}\n"
    if template.name in _GO_TEMPLATES:  # ollama has no jinja
        lines.append(f'TEMPLATE """{_GO_TEMPLATES[template.name]}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    modelfile = "\n".join(lines) + "\n"
    ends = " and ".join(f"`{stop}`" for stop in stops)
    readme = f"""\
# A chat model

The chat template, {template.name}, is in tokenizer_config.json; the tokens that end an answer, {ends},
are in generation_config.json. To serve it, in this folder:

```
vllm serve .
{convert}ollama create mine -f Modelfile && ollama run mine
```

{TRAINING_TEMPLATE} is the template with the marks that `apply_chat_template(..., return_assistant_tokens_mask=True)`
and trl's `assistant_only_loss` need; plain jinja2 rejects them.

**A user's message can imitate the template.** transformers, vLLM, llama.cpp and ollama render a conversation as
one text and parse control tokens anywhere in it: a message that contains `{stops[0]}` ends itself, and the text after
it can pose as the system or the assistant. If you do not trust your users, remove such strings from their messages
before they reach the server. `megatoken chat` and `megatoken serve` take control tokens from the template alone.
"""
    return {"Modelfile": modelfile, "README.md": readme, TRAINING_TEMPLATE: template.jinja}
