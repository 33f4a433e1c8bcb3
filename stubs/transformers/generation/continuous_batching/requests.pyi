from enum import IntEnum

class RequestStatus(IntEnum):
    PENDING = ...
    FINISHED = ...

class RequestState:
    request_id: str
    status: RequestStatus
    initial_tokens: list[int]
    generated_tokens: list[int]
    position_offset: int

    def current_len(self) -> int: ...
