"""Models of video, their objectives and samplers, and the encoders before them.

Letters of shapes in all models of video:

    b      batch
    i o    latent channels in and out
    t      frames
    h w    rows and columns of latent cells (y x where h are heads, or rows of patches)
    s      patches of a frame, row by row
    n      places in the video, frame by frame and row by row; positions of a scan
    c      hidden channels
    h e    heads, channels of a head
    l j    tokens of text, tokens of an image
    k      values of a patch, channels of a conditioning vector, rows of a modulation, channels of a state
"""
