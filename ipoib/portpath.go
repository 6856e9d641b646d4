package ipoib

import (
	"bytes"
	"fmt"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// Bounds of what waits for paths.
const (
	// maxPathJobs is how many packets wait for one path. Linux keeps three for one neighbour;
	// here several peers may be at one port.
	maxPathJobs = 16
	// maxAllPathJobs is how many packets wait for all paths together.
	maxAllPathJobs = 2048
)

// A portPath is the path to another port. Packets and connections to a known link-layer address
// need the path to its port. On Ethernet the GID is enough; on InfiniBand the administrator is
// asked (RFC 4391 section 9.3.1).
type portPath struct {
	path  verbs.Path // DGID is set from the beginning
	known bool
	stale bool // path may have changed: it is used until the administrator has answered
	asked bool // the administrator has been asked, and has not answered
	jobs  []pathJob

	lru.Links[portPath] // in fabric.unused
}

// A pathJob is a packet that waits for a path: a datagram, or an IP packet with its
// next hop that may open a connection.
type pathJob struct {
	link   encap.LinkAddr
	hop    netip.Addr // of an IP packet
	packet []byte     // frame of a datagram, or IP packet
}

// pathKnown reports whether the path to the port is known, so that packets can leave.
func (f *Interface) pathKnown(dgid ib.GID) bool {
	if f.fab == nil {
		return true
	}
	p := f.fab.paths[dgid]
	return p != nil && p.known
}

// takePath is pathKnown for a packet that is about to leave: it notes that the path is used.
func (f *Interface) takePath(dgid ib.GID) bool {
	known := f.pathKnown(dgid)
	if known && f.fab != nil {
		f.usePath(f.fab.paths[dgid])
	}
	return known
}

// pathTo returns the path to a port; zero on Ethernet, or if the path is not known.
func (f *Interface) pathTo(dgid ib.GID) verbs.Path {
	if f.pathKnown(dgid) && f.fab != nil {
		return f.fab.paths[dgid].path
	}
	return verbs.Path{}
}

// usePath notes that p is used now, and asks for it again if it may have changed.
func (f *Interface) usePath(p *portPath) {
	f.fab.unused.Remove(p)
	f.fab.unused.Push(p)
	if p.stale {
		f.askPath(p)
	}
}

// sendTo sends a frame to a UD QP as soon as there is a path to its port.
func (f *Interface) sendTo(link encap.LinkAddr, fr []byte) {
	if f.takePath(link.GID) {
		f.do(SendUD{Link: link, Frame: fr})
		return
	}
	f.awaitPath(pathJob{link: link, packet: fr})
}

// awaitPath keeps a packet until the path to its port is known.
func (f *Interface) awaitPath(j pathJob) {
	p := f.fab.paths[j.link.GID]
	if p == nil {
		if p = f.newPath(j.link.GID); p == nil {
			f.count(dropPathQueue)
			return
		}
	}
	if len(p.jobs) >= maxPathJobs || f.fab.waiting >= maxAllPathJobs {
		f.count(dropPathQueue)
		return
	}
	p.jobs = append(p.jobs, j)
	f.fab.waiting++
	f.usePath(p)
	f.askPath(p)
}

// wantPath asks for a path that nothing waits for yet.
func (f *Interface) wantPath(dgid ib.GID) {
	p := f.fab.paths[dgid]
	if p == nil {
		p = f.newPath(dgid)
	}
	if p != nil {
		f.askPath(p)
	}
}

// newPath makes the record of a path. If there are too many it replaces the one used longest ago
// that is neither asked for nor waited for; without such a path it returns nil.
func (f *Interface) newPath(dgid ib.GID) *portPath {
	if len(f.fab.paths) >= f.opt.maxPeers() {
		old := f.fab.unused.Oldest()
		for old != nil && (old.asked || len(old.jobs) > 0) {
			old = old.Newer()
		}
		if old == nil {
			return nil
		}
		f.forgetPath(old)
	}
	p := &portPath{path: verbs.Path{DGID: dgid}}
	f.fab.paths[dgid] = p
	f.fab.unused.Push(p)
	return p
}

func (f *Interface) forgetPath(p *portPath) {
	delete(f.fab.paths, p.path.DGID)
	f.fab.unused.Remove(p)
	if p.known {
		f.touchPort(p.path.DGID)
		f.do(ForgetPath{DGID: p.path.DGID})
	}
}

// askPath asks the administrator for p, unless it has been asked already. While the administrator
// is not ready a path that is known stays as it is; a query for any other fails at once.
func (f *Interface) askPath(p *portPath) {
	if p.asked || p.known && f.fab.state != sa.StateReady {
		return
	}
	p.asked = true
	f.count(nPathsAsked)
	f.saStep(sa.Query{PathKey: f.pathKey(p)})
}

// pathKey returns the key by which p is asked for: in the partition of the link, with the traffic
// class of the broadcast group, as Linux asks.
func (f *Interface) pathKey(p *portPath) sa.PathKey {
	return sa.PathKey{DGID: p.path.DGID, PKey: f.opt.pkey() | ib.PKeyFull, TrafficClass: f.fab.broadcast.TrafficClass}
}

// askAgain asks for all paths that may have changed, if the administrator is ready.
func (f *Interface) askAgain() {
	if f.fab.state != sa.StateReady {
		return
	}
	for _, p := range f.fab.unused.Values() {
		if p.stale {
			f.askPath(p)
		}
	}
}

// pathFound takes a path from the administrator, and sends what has waited for it.
func (f *Interface) pathFound(path verbs.Path) {
	p := f.fab.paths[path.DGID]
	if p == nil {
		return
	}
	news, first := p.path != path || !p.known, !p.known
	p.path, p.known, p.stale, p.asked = path, true, false, false
	if news {
		f.note(Note{Kind: NoteNeigh, Peer: encap.LinkAddr{GID: path.DGID}, Text: pathText(path)})
		f.do(UsePath{Path: path})
	}
	if f.conns.ofHost[path.DGID] > 0 {
		f.leaveLIDs(path.DGID)
	}
	if first {
		f.touchPort(path.DGID)
	}
	for _, j := range f.takeJobs(p) {
		if j.hop.IsValid() {
			f.deliver(j.hop, j.link, j.packet)
		} else {
			f.do(SendUD{Link: j.link, Frame: j.packet})
		}
	}
}

// leaveLIDs closes UC connections to the port of gid, of all ports if that is zero, whose queue pairs use other LIDs
// than those of today: nothing tells that their packets go nowhere. An RC connection fails by itself, if it does.
func (f *Interface) leaveLIDs(gid ib.GID) {
	for _, c := range f.conns.byAge() {
		if c.state != connUp || !gid.IsZero() && c.peer.key.GID != gid {
			continue
		}
		if why := f.oldLID(c); why != "" {
			f.hangUp(c, why)
		}
	}
}

// oldLID returns which LID of c, a UC connection, is not that of today; empty if there is none, and for RC.
func (f *Interface) oldLID(c *conn) string {
	if f.fab == nil || c.trans != ib.UC || c.params.Path.DLID == 0 {
		return ""
	}
	if c.lid != f.fab.opt.Port.LID {
		return "the port has another LID"
	}
	if p := f.pathTo(c.peer.key.GID); p.DLID != 0 && p.DLID != c.params.Path.DLID {
		return "another LID leads to the peer"
	}
	return ""
}

// proveLIDs has the path to the peer of c, a connection that has just come up, asked for again if it differs
// from that of c: one of the two is old.
func (f *Interface) proveLIDs(c *conn) {
	switch {
	case f.oldLID(c) == "":
	case c.lid != f.fab.opt.Port.LID:
		f.hangUp(c, f.oldLID(c))
	default:
		f.doubtPath(c.peer.key.GID)
		f.wantPath(c.peer.key.GID)
	}
}

func pathText(p verbs.Path) string {
	s := fmt.Sprintf("path to %v: LID %d, SL %d, MTU %v, rate %v, packet life %v", p.DGID, p.DLID, p.SL, p.MTU, p.Rate, p.Life.Duration())
	if p.GRH {
		s += fmt.Sprintf(", GRH with hop limit %d", p.HopLimit)
	}
	return s
}

// pathFailed drops what waits for a path. A path that was known stays in use unless the
// administrator refuses it.
func (f *Interface) pathFailed(a sa.PathFailed) {
	p := f.fab.paths[a.Key.DGID]
	if p == nil {
		return
	}
	p.asked = false
	jobs := f.takeJobs(p)
	f.n[dropNoPath] += uint64(len(jobs))
	why := a.Cause.String()
	if a.Cause == sa.Refused {
		why = a.Status.String()
	}
	if f.mayTell() {
		f.note(Note{Kind: NoteNeigh, Peer: encap.LinkAddr{GID: a.Key.DGID}, Text: fmt.Sprintf("no path to %v: %s", a.Key.DGID, why)})
	}
	switch {
	case !p.known:
		f.forgetPath(p)
	case a.Cause == sa.Refused:
		f.losePath(p)
	}
}

// losePath forgets a path that leads nowhere any more, and drops what waits for it.
func (f *Interface) losePath(p *portPath) {
	f.n[dropNoPath] += uint64(len(f.takeJobs(p)))
	f.forgetPath(p)
}

// doubtPath has the path to a port that did not answer asked for again.
func (f *Interface) doubtPath(dgid ib.GID) {
	if f.fab == nil {
		return
	}
	if p := f.fab.paths[dgid]; p != nil && p.known && !p.asked {
		p.stale = true
		f.saStep(sa.Doubt{PathKey: f.pathKey(p)})
	}
}

func (f *Interface) takeJobs(p *portPath) []pathJob {
	jobs := p.jobs
	f.fab.waiting -= len(jobs)
	p.jobs = nil
	return jobs
}

// touchPort marks every next hop at a port for settle.
func (f *Interface) touchPort(dgid ib.GID) {
	for _, p := range f.peers.byLink {
		if p.key.GID == dgid {
			f.touch(p) // settle sorts them
		}
	}
}

// dropPaths drops what waits for paths, because the link is down.
func (f *Interface) dropPaths() {
	if f.fab == nil {
		return
	}
	for _, p := range f.fab.unused.Values() {
		f.n[dropNoPath] += uint64(len(f.takeJobs(p)))
	}
}

// nameSender sets the remote GID of a MAD that came without a GRH: that of the known path to whose LID
// the MAD's leads back. A port may have several GIDs: of those it takes the one that the MAD itself
// names, else the lowest. Without such a path it takes the GID that a REQ names.
func (f *Interface) nameSender(m *verbs.MAD) {
	if f.fab == nil || !m.Remote.IsZero() {
		return
	}
	names, isREQ := f.cm.Peer(m), false
	if _, msg, err := mad.Parse(m.Data[:]); err == nil {
		if req, ok := msg.(mad.REQ); ok {
			names, isREQ = req.Primary.LocalGID, true
		}
	}
	for gid, p := range f.fab.paths {
		if !p.known || p.path.GRH || p.path.DLID != m.Path.DLID {
			continue
		}
		if gid == names {
			m.Remote = gid
			return
		}
		if m.Remote.IsZero() || bytes.Compare(gid[:], m.Remote[:]) < 0 {
			m.Remote = gid
		}
	}
	if isREQ && m.Remote.IsZero() {
		m.Remote = names
	}
}
