package mtu

import (
	"fmt"

	"ipoibcm/ib"
)

// Octets that RoCEv2 puts around a UD payload: IP, UDP, BTH, DETH, ICRC.
const (
	udOverhead4 = 20 + 8 + 12 + 8 + 4
	udOverhead6 = 40 + 8 + 12 + 8 + 4
	// The octets that the kernel keeps free for the largest header of an RC or UC packet.
	pathReserve = 80
)

// A Link is the link below the UD queue pair.
type Link struct {
	// Underlay is the IP MTU of the underlay device, 0 if unknown (on InfiniBand,
	// or if the provider does not give it).
	Underlay int
	IPv4     bool   // our GID is IPv4-mapped
	Path     ib.MTU // path MTU of the port; 0 means that it is derived from Underlay
	// MaxPayload is the provider's largest UD payload; 0 means the path MTU, or
	// 4096 if Underlay is known and Path is not.
	MaxPayload int
}

// PathMTU returns the IB path MTU of a RoCEv2 underlay, 0 if the underlay is too small for any.
func PathMTU(underlay int) ib.MTU { return ib.MTUFromOctets(underlay - pathReserve) }

// LargestUD returns the largest UD IP MTU that a RoCEv2 underlay carries without
// fragments of the underlay: 1444 for 1500 over IPv4, 1424 over IPv6.
func LargestUD(underlay int, ipv4 bool) int {
	over := udOverhead6
	if ipv4 {
		over = udOverhead4
	}
	return min(max(0, (underlay-over)&^3-headerLen), MaxUD) // payloads are padded to 4
}

// AcceptUD returns the largest UD IP MTU that we take from others if we send up to send: at least
// DefaultUD, which every host may send (RFC 4391 section 7).
func AcceptUD(send int) int { return max(DefaultUD, send) }

// A UDPlan says how an interface uses UD.
type UDPlan struct {
	MTU  int    // largest IP packet sent over UD
	Path ib.MTU // path MTU of RC and UC, and of UD as IB counts it
	IPv6 bool   // MTU is at least 1280, so IPv6 can be used
	// BeyondPath says that full UD frames exceed the path MTU: only hosts with our own agent
	// receive them.
	BeyondPath bool
	// Fragmented says that the kernel fragments full UD frames on the underlay.
	Fragmented bool
	// Notes are sentences for the log at start.
	Notes []string
}

// A UDError says that a UD MTU cannot be used, and what can be done.
type UDError struct {
	Want, Limit int // IP MTUs
	Underlay    int // IP MTU of the underlay device, 0 if it is not the reason
	Text        string
}

func (e *UDError) Error() string { return e.Text }

// PlanUD checks UD MTU want against the link. With want 0 it chooses the largest UD MTU that one
// frame of the link carries, at most DefaultUD. If l.Path is not set, an IPv6 underlay that carries
// less than MinIPv6 in one frame gets MinIPv6, in fragments. The error is a *UDError.
func PlanUD(want int, l Link) (UDPlan, error) {
	path := l.Path
	if path == 0 {
		path = PathMTU(l.Underlay)
	}
	most := l.payload(path)
	if want == 0 {
		if want = l.auto(most); want < MinIPv4 {
			return UDPlan{}, tooSmall(want, l)
		}
	}
	if want < MinIPv4 || want > MaxUD {
		return UDPlan{}, &UDError{Want: want, Limit: MaxUD,
			Text: fmt.Sprintf("UD MTU %d is not in %d to %d", want, MinIPv4, MaxUD)}
	}
	if l.Path != 0 && l.Underlay != 0 && want+headerLen > most {
		return UDPlan{}, tooLargePath(want, most)
	}
	p := UDPlan{MTU: want, Path: path, IPv6: want >= MinIPv6}
	if l.Underlay != 0 {
		limit := LargestUD(l.Underlay, l.IPv4)
		if want > limit {
			if l.IPv4 {
				return UDPlan{}, tooLargeIPv4(want, limit, l.Underlay)
			}
			p.Fragmented = true
		}
	}
	if want+headerLen > most {
		return UDPlan{}, &UDError{Want: want, Limit: most - headerLen,
			Text: fmt.Sprintf("UD MTU %d needs a UD payload of %d octets, the device takes %d: use --ud-mtu %d",
				want, want+headerLen, most, most-headerLen)}
	}
	p.BeyondPath = want+headerLen > path.Octets()
	p.Notes = p.notes(l)
	return p, nil
}

// payload returns the largest UD payload of the device in octets.
func (l Link) payload(path ib.MTU) int {
	switch {
	case l.MaxPayload != 0:
		return l.MaxPayload
	case l.Path == 0 && l.Underlay != 0:
		return 4096
	}
	return path.Octets()
}

// auto returns the largest UD IP MTU that one frame of the link carries, at most DefaultUD. An
// IPv6 underlay also carries UD in fragments. So auto returns at least MinIPv6 for it, if payload
// allows that and l.Path is not set.
func (l Link) auto(payload int) int {
	n := min(DefaultUD, payload-headerLen)
	if l.Underlay == 0 {
		return n
	}
	most := n
	n = min(n, LargestUD(l.Underlay, l.IPv4))
	if !l.IPv4 && l.Path == 0 && n < MinIPv6 {
		n = min(most, MinIPv6)
	}
	return n
}

func tooSmall(limit int, l Link) error {
	return &UDError{Want: MinIPv4, Limit: max(0, limit), Underlay: l.Underlay, Text: fmt.Sprintf(
		"an underlay with MTU %d carries datagrams of %d octets, %d are needed: raise its MTU", l.Underlay,
		max(0, limit), MinIPv4)}
}

// tooLargeIPv4 names both remedies. The kernel cannot fragment IPv4 UD packets, because they carry
// DF. They need DF: it makes the kernel send identification 0, which the ICRC covers
// (provider/softroce/socket.go).
func tooLargeIPv4(want, limit, underlay int) error {
	jumbo := (want+headerLen+3)&^3 + udOverhead4
	return &UDError{Want: want, Limit: limit, Underlay: underlay, Text: fmt.Sprintf(
		"UD MTU %d does not fit an IPv4 underlay with MTU %d, which carries at most %d: "+
			"either use --ud-mtu %d on all hosts of the link, or raise the underlay MTU to at least %d (jumbo frames)",
		want, underlay, limit, limit, jumbo)}
}

// tooLargePath names both remedies for a device whose path MTU is the limit and depends on the
// underlay MTU.
func tooLargePath(want, most int) error {
	need := ib.MTU256
	for need.Octets() < want+headerLen {
		need++
	}
	return &UDError{Want: want, Limit: most - headerLen, Text: fmt.Sprintf(
		"UD MTU %d needs an IB path MTU of %d, the device has %d: "+
			"either use --ud-mtu %d on all hosts of the link, or raise the underlay MTU to at least %d (jumbo frames)",
		want, need.Octets(), most, most-headerLen, need.Octets()+pathReserve)}
}

func (p UDPlan) notes(l Link) []string {
	var notes []string
	if p.Fragmented {
		notes = append(notes, fmt.Sprintf("UD frames above %d octets leave as fragments: the underlay MTU is %d",
			LargestUD(l.Underlay, l.IPv4), l.Underlay))
	}
	if p.BeyondPath {
		notes = append(notes, fmt.Sprintf("UD frames above %d octets exceed the IB path MTU %d: only ipoibcm takes them",
			p.Path.Octets()-headerLen, p.Path.Octets()))
	}
	if !p.IPv6 {
		notes = append(notes, fmt.Sprintf("IPv6 stays off: the UD MTU %d is below %d", p.MTU, MinIPv6))
	}
	return notes
}
