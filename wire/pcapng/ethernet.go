package pcapng

import "encoding/binary"

// Ethernet returns the Ethernet header of the IP packet ip: synthetic unicast addresses, and for
// groups the addresses that IP uses on Ethernet. It is all zeros if ip has no whole header.
func Ethernet(ip []byte) (h [EthernetLen]byte) {
	switch {
	case len(ip) >= 20 && ip[0]>>4 == 4:
		mac4(h[0:6], ip[16:20])
		mac4(h[6:12], ip[12:16])
		binary.BigEndian.PutUint16(h[12:], 0x0800)
	case len(ip) >= 40 && ip[0]>>4 == 6:
		mac6(h[0:6], ip[24:40])
		mac6(h[6:12], ip[8:24])
		binary.BigEndian.PutUint16(h[12:], 0x86dd)
	}
	return h
}

// mac4 writes the MAC of an IPv4 address: 01:00:5e and 23 bits for a group (RFC
// 1112 section 6.4).
func mac4(mac, a []byte) {
	switch {
	case a[0]>>4 == 0xe:
		copy(mac, []byte{0x01, 0x00, 0x5e, a[1] & 0x7f, a[2], a[3]})
	case a[0]&a[1]&a[2]&a[3] == 0xff:
		copy(mac, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	default:
		copy(mac, []byte{0x02, 0x49, a[0], a[1], a[2], a[3]})
	}
}

// mac6 writes the MAC of an IPv6 address: 33:33 and 32 bits for a group (RFC 2464
// section 7).
func mac6(mac, a []byte) {
	mac[0], mac[1] = 0x02, 0x49
	if a[0] == 0xff {
		mac[0], mac[1] = 0x33, 0x33
	}
	copy(mac[2:], a[12:16])
}
