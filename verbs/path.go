package verbs

import (
	"ipoibcm/ib"
)

// A Path describes how packets get from a port of ours to another port. It holds everything that
// address handles, connections and the messages that set up connections need. On RoCE the GID is
// enough to reach the destination, and [PathTo] fills in the rest. On InfiniBand the subnet
// administrator returns the path (package sa).
type Path struct {
	SGID, DGID ib.GID
	SLID, DLID ib.LID // InfiniBand; zero on RoCE
	// GRH reports whether packets carry a GRH: always on RoCE, and on InfiniBand to another subnet
	// or where the port requires it. FlowLabel, TrafficClass and HopLimit are fields of the GRH.
	GRH          bool
	FlowLabel    uint32 // 20 bits
	TrafficClass uint8
	HopLimit     uint8

	SL   uint8
	PKey ib.PKey // the membership bit is the partition's, not the port's; zero if unknown
	MTU  ib.MTU  // the path MTU
	Rate ib.Rate // zero means the rate of the port
	// Life is the packet lifetime. Zero means unknown; [Path.AckTimeout] is then zero too.
	Life ib.Timeout
}

// roceHopLimit is the hop limit of the paths that PathTo makes.
const roceHopLimit = 64

// PathTo returns the path from sgid to dgid over a port whose link layer is Ethernet. Its MTU comes
// from [PathMTU], for which a provider may ask the kernel.
func PathTo(p Provider, sgid, dgid ib.GID) Path {
	return Path{SGID: sgid, DGID: dgid, GRH: true, HopLimit: roceHopLimit, MTU: PathMTU(p, dgid)}
}

// AH returns the attributes of p for address handles and queue pairs.
func (p Path) AH() AHAttr {
	a := AHAttr{SGID: p.SGID, DGID: p.DGID, SL: p.SL, LID: p.DLID, GRH: p.GRH, Rate: p.Rate}
	if p.GRH {
		a.FlowLabel, a.TrafficClass, a.HopLimit = p.FlowLabel, p.TrafficClass, p.HopLimit
	}
	return a
}

// AckTimeout returns how long a requester waits for an ACK: twice the packet lifetime (IBA
// 12.7.34). It returns zero if the lifetime is unknown.
func (p Path) AckTimeout() ib.Timeout {
	if p.Life == 0 {
		return 0
	}
	return min(p.Life+1, 31)
}

// SubnetLocal reports whether p stays in its subnet, in the sense of the Subnet Local field of CM
// messages: the hop limit is at most 1.
func (p Path) SubnetLocal() bool { return p.HopLimit <= 1 }
