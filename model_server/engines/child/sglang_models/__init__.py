"""Model classes for SGLang's registry: what `SGLANG_EXTERNAL_MODEL_PACKAGE` names."""
