"""The method of arXiv:2606.18304 and what this project adds to it, in torch alone: tensors in, tensors out.

Names of tensors end in their axes, ``scores_LEI``. Each letter has one meaning in the whole package; a digit is an
axis of that length, and a part of an axis keeps its letter.

======  ===============================================================================================
letter  axis
======  ===============================================================================================
A       input features of a linear layer
B       samples of a batch
D       members of a group that are ranked together
E       experts of a layer
G       groups: those that share a budget, those of a router, or those that share a scale
H       hidden size
I       channels of an expert before pruning (intermediate size)
J       blocks of an expert (alignment)
K       slots of the router's top-k
L       MoE layers
M       routed rows, one for each pair of a token and a slot, of all experts of a layer or of one expert
N       kept channels of an expert; their number is its width
O       output features of a linear layer
P       pruned channels of an expert
R       rank of an adapter
S       positions of a sample
T       tokens of a batch, all samples and positions
U       projections of an expert: gate, up, down
V       vocabulary
W       windows of text
======  ===============================================================================================
"""
