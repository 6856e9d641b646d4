package ibverbs

import (
	"slices"

	"ipoibcm/ib"
)

// GID types of the kernel's table (enum ibv_gid_type).
const (
	gidIB = iota
	gidRoCE1
	gidRoCE2
)

// A gidEntry is one entry of a device's GID table.
type gidEntry struct {
	gid     ib.GID
	index   int
	port    int
	kind    int // gidRoCE2 and the like
	ifindex int // of the network device that has the address
}

// A gidTable is the usable entries of a port, the default one first. Index numbers change whenever
// an address does, so nothing keeps an index.
type gidTable []gidEntry

// withAddress returns the entries whose address is in has, the addresses of a network device. The
// kernel's table also has a link-local GID made of the MAC, even if the network device does not
// have that address and nothing answers for it.
func withAddress(all []gidEntry, has []ib.GID) []gidEntry {
	return slices.DeleteFunc(slices.Clone(all), func(e gidEntry) bool { return !slices.Contains(has, e.gid) })
}

// chooseGIDs returns the RoCE v2 entries of the network device ifindex in the order of preference:
// prefer if it is there, IPv6 link-local (it needs no configuration and every host has one), other
// IPv6, IPv4. If only is not zero it returns no other GID.
func chooseGIDs(all []gidEntry, ifindex int, only, prefer ib.GID) gidTable {
	var t gidTable
	for _, e := range all {
		switch {
		case e.kind != gidRoCE2 || e.ifindex != ifindex || e.gid.IsZero() || e.gid.IsMulticast():
		case !only.IsZero() && e.gid != only:
		case slices.ContainsFunc(t, func(o gidEntry) bool { return o.gid == e.gid }):
		default:
			t = append(t, e)
		}
	}
	rank := func(e gidEntry) int {
		switch {
		case e.gid == prefer:
			return 0
		case e.gid.Is4():
			return 3
		case e.gid.Addr().IsLinkLocalUnicast():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(t, func(a, b gidEntry) int { return rank(a) - rank(b) })
	return t
}

// chooseIB returns the entries of an InfiniBand port in the order of the table, whose first entry
// is the port's own GID. If only is not zero it returns no other GID.
func chooseIB(all []gidEntry, port int, only ib.GID) (t gidTable) {
	for _, e := range all {
		if e.kind == gidIB && e.port == port && !e.gid.IsZero() && (only.IsZero() || e.gid == only) {
			t = append(t, e)
		}
	}
	return t
}

// gids returns the GIDs of t.
func (t gidTable) gids() []ib.GID {
	var l []ib.GID
	for _, e := range t {
		l = append(l, e.gid)
	}
	return l
}

// source returns the entry to send from: that of gid, or the first of dst's family if gid is zero.
func (t gidTable) source(gid, dst ib.GID) (gidEntry, bool) {
	for _, e := range t {
		if e.gid == gid || gid.IsZero() && e.gid.Is4() == dst.Is4() {
			return e, true
		}
	}
	return gidEntry{}, false
}

// at returns the GID with that index.
func (t gidTable) at(index int) (ib.GID, bool) {
	for _, e := range t {
		if e.index == index {
			return e.gid, true
		}
	}
	return ib.GID{}, false
}
