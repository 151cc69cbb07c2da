"""Weights fitted anew to the inputs that they will meet, and quantised with error feedback, in one pass.

options.py   what may be asked for
inputs.py    what enters a site, sums over the sparse inputs and over what skipping takes from them; its new weights
experts.py   what enters the experts of a mixture, and their matrices encoded one by one
run.py       the model, block by block and site by site, all upstream sparse, refitted and quantised already
"""
