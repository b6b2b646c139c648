"""Plans of models for which transformers 5.23 has none, by the model_type of their configurations."""

# Names in the base model, then those beside it.
_PLANS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "gpt2": (
        {
            "wte": "embedding_rowwise",
            "h.*.attn.c_attn": "colwise",
            "h.*.attn.c_proj": "rowwise",
            "h.*.crossattention.q_attn": "colwise",
            "h.*.crossattention.c_attn": "colwise",
            "h.*.crossattention.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        {"lm_head": "colwise_gather_output"},
    ),
    "bert": (
        {
            "embeddings.word_embeddings": "embedding_rowwise",
            "encoder.layer.*.attention.self.query": "colwise",
            "encoder.layer.*.attention.self.key": "colwise",
            "encoder.layer.*.attention.self.value": "colwise",
            "encoder.layer.*.attention.output.dense": "rowwise",
            "encoder.layer.*.crossattention.self.query": "colwise",
            "encoder.layer.*.crossattention.self.key": "colwise",
            "encoder.layer.*.crossattention.self.value": "colwise",
            "encoder.layer.*.crossattention.output.dense": "rowwise",
            "encoder.layer.*.intermediate.dense": "colwise",
            "encoder.layer.*.output.dense": "rowwise",
        },
        {"cls.predictions.decoder": "colwise_gather_output"},
    ),
}


def plan_for_type(model_type: str, prefix: str) -> dict[str, str]:
    """Patterns and names of styles for a type of model, whose base model's names start with `prefix`; or none.

    >>> plan_for_type("gpt2", "transformer.")["transformer.wte"]
    'embedding_rowwise'
    """
    base, head = _PLANS.get(model_type, ({}, {}))
    return {**{prefix + name: style for name, style in base.items()}, **head}
