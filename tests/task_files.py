"""What task files of lm-eval are made of."""

OUR_DATA = "custom_dataset: !function sparsepack.eval.task_data.jsonl\ndataset_kwargs: {file: data.jsonl}\n"
MULTIPLE_CHOICE = """
output_type: multiple_choice
test_split: test
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""
