package verbs

import (
	"ipoibcm/ib"
)

// A Path is how packets get from a port of ours to another port: all that address
// handles, connections and the messages that set them up need to know of the way,
// together, because it is found out together. On RoCE a GID leads to its
// destination, and [PathTo] says the rest; on InfiniBand the subnet administrator is
// asked (package sa).
type Path struct {
	SGID, DGID ib.GID
	SLID, DLID ib.LID // InfiniBand; zero on RoCE
	// GRH says that packets carry one: always on RoCE, and on InfiniBand to another
	// subnet or where the port asks for it. The next three are in it.
	GRH          bool
	FlowLabel    uint32 // 20 bits
	TrafficClass uint8
	HopLimit     uint8

	SL   uint8
	PKey ib.PKey // with the membership bit of the partition, not of the port; zero: not known
	MTU  ib.MTU  // of packets, the largest
	Rate ib.Rate // zero: that of the port
	// Life is how long a packet may be on its way; zero: not known.
	Life ib.Timeout
}

// roceHopLimit is that of all packets on RoCE.
const roceHopLimit = 64

// PathTo returns the path to dgid over a port whose link layer is Ethernet. A provider may ask the kernel for its MTU.
func PathTo(p Provider, sgid, dgid ib.GID) Path {
	return Path{SGID: sgid, DGID: dgid, GRH: true, HopLimit: roceHopLimit, MTU: PathMTU(p, dgid)}
}

// AH returns what address handles and queue pairs take of p.
func (p Path) AH() AHAttr {
	a := AHAttr{SGID: p.SGID, DGID: p.DGID, SL: p.SL, LID: p.DLID, GRH: p.GRH, Rate: p.Rate}
	if p.GRH {
		a.FlowLabel, a.TrafficClass, a.HopLimit = p.FlowLabel, p.TrafficClass, p.HopLimit
	}
	return a
}

// AckTimeout returns how long a requester waits for an ACK: twice the life of a
// packet (IBA 12.7.34). Zero: not known.
func (p Path) AckTimeout() ib.Timeout {
	if p.Life == 0 {
		return 0
	}
	return min(p.Life+1, 31)
}

// SubnetLocal reports whether p stays in its subnet, as the messages of CM say it.
func (p Path) SubnetLocal() bool { return p.HopLimit <= 1 }
