package datapath

import (
	"encoding/binary"

	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// carryCE marks the packet of a connection message as having met congestion, because
// a packet below it was marked on its way (RFC 6040 section 4.2). One that is not
// ECN-capable stays as it is: the RC sender below reacts to the mark itself, so the
// packet need not be dropped to tell somebody.
func carryCE(msg []byte) {
	if len(msg) < headerLen {
		return
	}
	pkt := msg[headerLen:]
	switch encap.EtherType(binary.BigEndian.Uint16(msg)) {
	case encap.IPv4:
		if len(pkt) < 20 || pkt[0]>>4 != 4 {
			return
		}
	case encap.IPv6:
		if len(pkt) < 40 || pkt[0]>>4 != 6 {
			return
		}
	default:
		return
	}
	if ip.ECNCapable(pkt) {
		ip.SetCE(pkt)
	}
}
