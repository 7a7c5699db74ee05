"""Tensor parallelism: one model over the GPUs of one host, each with a share of every large layer and of the KV cache.

The engine's process is rank 0 and decides everything; one worker process for each further GPU runs the same steps on its
share. `shards` says what is whose, `loading` loads it by transformers' own plan, `collectives` joins partial results,
`lora` splits adapters, `team` is rank 0's side and `worker` the other ranks', `messages` what goes between them.
"""
