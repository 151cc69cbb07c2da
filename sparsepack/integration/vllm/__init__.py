"""The plug-in by which vLLM serves slid folders and folders of planes (docs/vllm.md).

plugin.py         what vLLM calls in each of its processes: begin here
config.py         which layers are stored in a format of ours, and what is refused
linear_method.py  how a slid layer is loaded, prepared and multiplied
planes_method.py  how a layer in planes is, and which tokens count as decoded
"""
