"""Rounds with real devices: control messages by Flower, slices and updates by the slice service.

# client.py of a Flower project
app = make_client_app(participant_of)

# server.py
app = make_server_app(train)
"""
