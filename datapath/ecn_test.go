package datapath

import (
	"bytes"
	"testing"

	"ipoibcm/wire/encap"
)

// A mark on the outer packet reaches the inner one if that may be marked (RFC 6040
// section 4.2, figure 4).
func TestCarryCE(t *testing.T) {
	message := func(typ encap.EtherType, version, ecn byte) []byte {
		msg, _ := encap.Header{Type: typ}.AppendBinary(nil)
		pkt := make([]byte, 48)
		if pkt[0] = version << 4; version == 4 {
			pkt[0], pkt[1] = 0x45, ecn
		} else {
			pkt[1] = ecn << 4
		}
		return append(msg, pkt...)
	}
	ecnOf := func(msg []byte) byte {
		if msg[headerLen]>>4 == 4 {
			return msg[headerLen+1] & 3
		}
		return msg[headerLen+1] >> 4 & 3
	}
	for inner, want := range map[byte]byte{0: 0, 1: 3, 2: 3, 3: 3} {
		for _, m := range [][]byte{message(encap.IPv4, 4, inner), message(encap.IPv6, 6, inner)} {
			carryCE(m)
			if got := ecnOf(m); got != want {
				t.Errorf("IPv%d with ECN %d: got %d, want %d", m[headerLen]>>4, inner, got, want)
			}
		}
	}
	for name, m := range map[string][]byte{
		"ARP":                  message(encap.ARP, 4, 2),
		"IPv6 in an IPv4 type": message(encap.IPv4, 6, 2),
		"too short":            message(encap.IPv4, 4, 2)[:headerLen+19],
		"no header":            {1, 2},
	} {
		was := bytes.Clone(m)
		if carryCE(m); !bytes.Equal(m, was) {
			t.Errorf("%s: changed to %x", name, m)
		}
	}
}
