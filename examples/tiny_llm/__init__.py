"""A small language model served from the pages of kv_cache_manager_v2 on the emulated device.

Start at `engine.py`: it is how a serving engine drives the manager. `model.py` is the model, `paged.py` its view of the pages,
`contiguous.py` the same view of private arrays, `workload.py` what is asked, `proof.py` the comparison, `report.py` the table.
"""
