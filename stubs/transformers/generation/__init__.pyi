class ContinuousBatchingConfig:
    max_batch_tokens: int | None

    def __init__(self, **options: object) -> None: ...

class GenerationOutput:
    generated_tokens: list[int]
    error: str | None
