#!/usr/bin/env python3
"""Reads the vectors beside it and checks them, with nothing but Python's library."""
import ipaddress, json, pathlib

def packet(p):  # each field is where it says, has the value it says, and none is missing
    octets, at = bytes.fromhex(p["octets"]), 0
    for f in p["fields"]:
        assert 8 * f["octet"] + f["bit"] == at, (p["name"], f["name"], "is not at bit", at)
        at += f["bits"]
        value = int.from_bytes(octets, "big") >> 8 * len(octets) - at & (1 << f["bits"]) - 1
        assert f["hex"] == "%0*x" % ((f["bits"] + 3) // 4, value), (p["name"], f["name"], hex(value))
    assert at == 8 * len(octets), (p["name"], "has more octets than fields")

def crossing(local, remote, outstanding):  # without the flags octet the smaller address accepts
    accept = not outstanding or local[2:] < remote[2:]
    return {"verdict": "accept"} if accept else {"verdict": "reject", "reason": 28}

def receive_mtu(own, peer, ipv6):
    mtu = min(own, peer, 2**31) - 4
    return {"ip_mtu": mtu} if mtu >= (1280 if ipv6 else 576) else {"reject": 26}

def packet_mtu(octets, to, df, mtu, pending):
    to, most = ipaddress.ip_address(to), max(mtu, pending)
    if octets <= most: return {"verdict": "send" if octets <= mtu else "wait"}
    if to.version == 4 and not df and most > mtu and most >= 68: return {"verdict": "wait"}
    if str(to) == "255.255.255.255" or most < (68 if to.version == 4 else 1280): return {"verdict": "discard"}
    if to.version == 4 and not df: return {"verdict": "fragment", "mtu": most}
    return {"verdict": "discard"} if to.version == 4 and to.is_multicast else {"verdict": "too big", "mtu": most}

def inline(client_send, client_receive, server_send, server_receive):
    return {"call": min(client_send, server_receive), "reply": min(server_send, client_receive)}

def mpa(initiator, responder, want):  # what is settled agrees with the frames: RFC 6581 section 9
    def enhanced(frame):
        w = int(frame[40:48], 16)
        return {"ird": w >> 16 & 0x3fff, "ord": w & 0x3fff, "rtr": "".join(f for f, b in zip("BCD", (30, 15, 14)) if w >> b & 1)}
    q, r = enhanced(want["request"]), enhanced(want["reply"])
    common = set(q["rtr"]) & set(r["rtr"])
    if "terminate" in want: return not common
    return (want["rtr"] in common and want["responder"] == {"ird": r["ird"], "ord": r["ord"]} and r["ord"] <= q["ird"]
            and q["rtr"] == initiator["rtr"] and want["initiator"] == {"ird": q["ird"], "ord": min(q["ord"], r["ird"])})

rules, packets, decisions = {"crossing": crossing, "receive_mtu": receive_mtu, "packet": packet_mtu, "inline": inline}, 0, 0
for file in sorted(pathlib.Path(__file__).parent.glob("*.json")):
    f = json.loads(file.read_text())
    for p in f["packets"]:
        packets, _ = packets + 1, packet(p)
    for d in f["decisions"]:
        decisions += 1
        same = mpa(**d["given"], want=d["want"]) if d["rule"] == "mpa" else rules[d["rule"]](**d["given"]) == d["want"]
        assert same, (file.name, d["name"])
print("%d packets and %d decisions: all hold" % (packets, decisions))
