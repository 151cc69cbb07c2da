"""The plug-in by which vLLM serves slid folders (docs/vllm.md).

plugin.py         what vLLM calls in each of its processes: begin here
config.py         which layers are slid, and what is refused
linear_method.py  how a slid layer is loaded, prepared and multiplied
"""
