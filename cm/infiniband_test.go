package cm

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// ibConnect has a manager send a REQ by way of path, and returns it with its MAD.
func ibConnect(t *testing.T, m *Manager, path verbs.Path) (*verbs.MAD, mad.REQ) {
	t.Helper()
	for _, a := range m.Step(nil, time.Unix(1000, 0), Connect{Handle: 1, Remote: gidB, QPN: 0xa1, PathMTU: ib.MTU1024,
		AckTimeout: path.AckTimeout(), ServiceID: serviceid.New(serviceid.RFC, 0x0b), Path: path}) {
		if s, ok := a.(SendMAD); ok {
			_, msg, err := mad.Parse(s.MAD.Data[:])
			if err != nil {
				t.Fatal(err)
			}
			return s.MAD, msg.(mad.REQ)
		}
	}
	t.Fatal("no MAD was sent")
	return nil, mad.REQ{}
}

// On InfiniBand a REQ describes the path that the administrator gave (IBA volume 1
// section 12.7), and its MAD takes it.
func TestREQDescribesItsPath(t *testing.T) {
	path := verbs.Path{SGID: gidA, DGID: gidB, SLID: 4, DLID: 6, SL: 3, Rate: 7, Life: 18, MTU: ib.MTU2048,
		TrafficClass: 9}
	for _, tt := range []struct {
		name         string
		hops         uint8
		local        bool
		slid, dlid   ib.LID
		wantHopLimit uint8
	}{
		{"in the subnet", 0, true, 4, 6, 0},
		{"in the subnet, hop limit 1", 1, true, 4, 6, 1},
		{"by a router", 64, false, ib.PermissiveLID, ib.PermissiveLID, 64},
	} {
		p := path
		p.HopLimit, p.GRH = tt.hops, tt.hops > 1
		out, req := ibConnect(t, newManager(Options{}), p)
		if out.Path != p {
			t.Errorf("%s: the MAD goes by %+v, want %+v", tt.name, out.Path, p)
		}
		want := mad.PathInfo{LocalLID: tt.slid, RemoteLID: tt.dlid, LocalGID: gidA, RemoteGID: gidB, PacketRate: 7,
			TrafficClass: 9, HopLimit: tt.wantHopLimit, SL: 3, SubnetLocal: tt.local, LocalACKTimeout: 19}
		if req.Primary != want {
			t.Errorf("%s: primary path: got %+v\nwant %+v", tt.name, req.Primary, want)
		}
		if req.Alternate != (mad.PathInfo{}) {
			t.Errorf("%s: alternate path: got %+v, want zeros", tt.name, req.Alternate)
		}
	}
}

// Who takes a REQ answers, and sends, by the path that it describes; where it names
// no LIDs, by the way it came.
func TestREQIsAnsweredTheWayItCame(t *testing.T) {
	for _, tt := range []struct {
		name string
		hops uint8
		grh  bool // of the packet
		want verbs.Path
	}{
		{"in the subnet", 0, false, verbs.Path{SLID: 6, DLID: 4, SL: 3}},
		{"in the subnet, by a port that needs a GRH", 0, true, verbs.Path{SLID: 6, DLID: 4, SL: 3, GRH: true}},
		{"by a router", 64, true, verbs.Path{SLID: 6, DLID: 0x55, SL: 2, GRH: true, HopLimit: 64}},
	} {
		path := verbs.Path{SGID: gidA, DGID: gidB, SLID: 4, DLID: 6, SL: 3, HopLimit: tt.hops, GRH: tt.hops > 1, Life: 18}
		out, req := ibConnect(t, newManager(Options{}), path)
		b := New(Options{GID: gidB, CAGUID: 0xb, Rand: &counting{}})
		b.Step(nil, time.Unix(1000, 0), Listen{ServiceID: req.ServiceID})
		in := &verbs.MAD{Local: gidB, QPN: ib.QPNGSI, PKey: ib.DefaultPKey, Data: out.Data,
			Path: verbs.Path{SLID: 6, DLID: 0x55, SL: 2, GRH: tt.grh}}
		if tt.grh {
			in.Remote = gidA
		}
		var asked RequestReceived
		for _, a := range b.Step(nil, time.Unix(1000, 0), RecvMAD{in}) {
			if r, ok := a.(RequestReceived); ok {
				asked = r
			}
		}
		want := tt.want
		want.SGID, want.DGID, want.PKey, want.MTU, want.Rate, want.Life = gidB, gidA, ib.DefaultPKey, ib.MTU1024,
			ib.Rate10G, 18
		if asked.Path != want {
			t.Errorf("%s: got %+v\nwant %+v", tt.name, asked.Path, want)
		}
		for _, a := range b.Step(nil, time.Unix(1000, 0), Reject{Handle: asked.Handle, Reason: ReasonConsumer}) {
			if s, ok := a.(SendMAD); ok && s.MAD.Path != want {
				t.Errorf("%s: the answer goes by %+v, want %+v", tt.name, s.MAD.Path, want)
			}
		}
	}
}
