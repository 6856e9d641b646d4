package ip

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"ipoibcm/wire"
)

// A ChangeKind says what a group record of a report means for its sender.
type ChangeKind uint8

// Kinds of change. The records of IGMPv3 and MLDv2 that add or remove sources are
// Allow and Block; every other record or message is one of the first four.
const (
	Join    ChangeKind = 1 + iota // IGMPv1, IGMPv2, MLDv1 report
	Leave                         // IGMPv2 leave, MLDv1 done
	Include                       // only from the listed sources; with none it is a leave
	Exclude                       // from all but the listed sources
	Allow                         // these sources too
	Block                         // these sources no more
)

var changeKindNames = wire.Names[ChangeKind]{
	Join: "join", Leave: "leave", Include: "include", Exclude: "exclude", Allow: "allow", Block: "block",
}

// String prints the name of k in lower case.
func (k ChangeKind) String() string { return changeKindNames.Of(k, "ChangeKind(%d)") }

// A Change is one group record of a membership report.
type Change struct {
	Group   netip.Addr // always multicast
	Kind    ChangeKind
	Sources int // how many source addresses the record lists
}

// Wanted reports whether the sender of c now wants the group, as far as a receiver that keeps no
// list of sources can know. known is false if c alone does not show it (Block).
func (c Change) Wanted() (want, known bool) {
	switch c.Kind {
	case Join, Exclude, Allow:
		return true, true
	case Include:
		return c.Sources > 0, true
	case Leave:
		return false, true
	}
	return false, false
}

// ErrNotReport says that a packet is no membership report at all.
var ErrNotReport = errors.New("ip: not a membership report")

// Message types.
const (
	igmpV1Report = 0x12
	igmpV2Report = 0x16
	igmpV2Leave  = 0x17
	igmpV3Report = 0x22
	mldV1Report  = 131
	mldV1Done    = 132
	mldV2Report  = 143
)

// IsReport reports whether pkt looks like a membership report. It reads only a few octets. The
// caller passes such a packet to [AppendChanges], and still forwards it.
func IsReport(pkt []byte) bool {
	switch Version(pkt) {
	case 4:
		n := int(pkt[0]&15) * 4
		if n < V4HeaderLen || len(pkt) <= n || pkt[9] != ProtoIGMP {
			return false
		}
		return isIGMPReport(pkt[n])
	case 6:
		// MLD comes behind a hop-by-hop header with the router alert option.
		if len(pkt) <= V6HeaderLen+8 || pkt[6] != ProtoHopByHop || pkt[V6HeaderLen] != ProtoICMPv6 {
			return false
		}
		n := V6HeaderLen + 8 + int(pkt[V6HeaderLen+1])*8
		return len(pkt) > n && isMLDReport(pkt[n])
	}
	return false
}

func isIGMPReport(typ uint8) bool {
	return typ == igmpV1Report || typ == igmpV2Report || typ == igmpV2Leave || typ == igmpV3Report
}

func isMLDReport(typ uint8) bool {
	return typ == mldV1Report || typ == mldV1Done || typ == mldV2Report
}

// AppendChanges appends to dst the group records of the IGMPv1, v2, v3, MLDv1 or
// MLDv2 report in the IP packet pkt, in their order. A packet that is no report,
// such as a query, gives [ErrNotReport]. A broken report gives another error, and
// nothing is appended. The packet's length bounds the number of records.
func AppendChanges(dst []Change, pkt []byte) ([]Change, error) {
	if Version(pkt) == 6 {
		return appendMLD(dst, pkt)
	}
	return appendIGMP(dst, pkt)
}

// singleKinds are the messages about one group.
var singleKinds = map[uint8]ChangeKind{igmpV1Report: Join, igmpV2Report: Join, igmpV2Leave: Leave, mldV1Report: Join,
	mldV1Done: Leave}

func appendIGMP(dst []Change, pkt []byte) ([]Change, error) {
	p, err := AsV4(pkt)
	if err != nil {
		return dst, err
	}
	m := p.Payload()
	if p.Protocol() != ProtoIGMP || p.MF() || p.FragOffset() != 0 || len(m) == 0 || !isIGMPReport(m[0]) {
		return dst, ErrNotReport
	}
	if len(m) < 8 {
		return dst, &wire.ShortError{What: "IGMP report", Need: 8, Have: len(m)}
	}
	if Checksum(m) != 0 {
		return dst, &wire.FieldError{What: "IGMP report", Field: "checksum", Value: uint64(binary.BigEndian.Uint16(m[2:]))}
	}
	if m[0] == igmpV3Report {
		return appendRecords(dst, "IGMPv3 report", m, 4)
	}
	return appendChange(dst, "IGMP report", netip.AddrFrom4([4]byte(m[4:8])), singleKinds[m[0]], 0)
}

func appendMLD(dst []Change, pkt []byte) ([]Change, error) {
	p, err := AsV6(pkt)
	if err != nil {
		return dst, err
	}
	proto, off, first, ok := p.Upper()
	if !ok || !first || proto != ProtoICMPv6 || off >= len(p) || !isMLDReport(p[off]) {
		return dst, ErrNotReport
	}
	m, need := p[off:], 8
	if m[0] != mldV2Report {
		need = 24
	}
	if len(m) < need {
		return dst, &wire.ShortError{What: "MLD report", Need: need, Have: len(m)}
	}
	if Checksum6(p.Src(), p.Dst(), ProtoICMPv6, m) != 0 {
		return dst, &wire.FieldError{What: "MLD report", Field: "checksum", Value: uint64(binary.BigEndian.Uint16(m[2:]))}
	}
	if m[0] == mldV2Report {
		return appendRecords(dst, "MLDv2 report", m, 16)
	}
	return appendChange(dst, "MLD report", netip.AddrFrom16([16]byte(m[8:24])), singleKinds[m[0]], 0)
}

// recordKinds are the types of group records: MODE_IS and CHANGE_TO (INCLUDE, EXCLUDE), ALLOW and
// BLOCK.
var recordKinds = map[uint8]ChangeKind{1: Include, 2: Exclude, 3: Include, 4: Exclude, 5: Allow, 6: Block}

// appendRecords reads the group records of RFC 3376 section 4.2.4 and RFC 3810
// section 5.2.5, which differ only in the length of an address.
func appendRecords(dst []Change, what string, m []byte, addrLen int) ([]Change, error) {
	n, b, old := int(binary.BigEndian.Uint16(m[6:])), m[8:], len(dst)
	for range n {
		if len(b) < 4+addrLen {
			return dst[:old], &wire.ShortError{What: what, Need: 4 + addrLen, Have: len(b)}
		}
		sources := int(binary.BigEndian.Uint16(b[2:]))
		size := 4 + addrLen + sources*addrLen + int(b[1])*4
		if len(b) < size {
			return dst[:old], &wire.ShortError{What: what, Need: size, Have: len(b)}
		}
		group, _ := netip.AddrFromSlice(b[4 : 4+addrLen])
		if kind, ok := recordKinds[b[0]]; ok { // others are to be ignored (RFC 3376 section 4.2.12)
			var err error
			if dst, err = appendChange(dst, what, group, kind, sources); err != nil {
				return dst[:old], err
			}
		}
		b = b[size:]
	}
	return dst, nil
}

func appendChange(dst []Change, what string, g netip.Addr, k ChangeKind, sources int) ([]Change, error) {
	if !g.IsMulticast() {
		return dst, fmt.Errorf("%s: %s is no group", what, g)
	}
	return append(dst, Change{Group: g, Kind: k, Sources: sources}), nil
}
