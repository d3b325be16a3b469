"""From a converted model to numbers: draws of its outputs, and what they say together.

sample       one call under S draws; draws or means held over many calls, or written into plain models
predict      data -> batches -> outputs of draws -> averages -> a Prediction; checks refuse on the way in and out
prediction   the Prediction itself; views show it as rows and tables, panels as pictures
distance, stacking, norms, export
             what predictions are of: distances, weights, batch norms, a file without slimbayes
"""
