package simfabric

import (
	"cmp"
	"slices"
	"time"

	"ipoibcm/counters"
	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// Bounds of a port. Events and MADs beyond them are dropped and counted.
const (
	maxEvents = 1024
	maxMADs   = 256
	maxDepth  = 1 << 16
)

// PortOptions describe a port. Only GID must be set.
type PortOptions struct {
	GID   ib.GID
	GUID  ib.GUID   // zero means a random one
	MTU   ib.MTU    // path MTU; zero means 4096 octets
	PKeys []ib.PKey // none means the default P_Key
	// MaxUDPayload is in octets. Zero means 4096.
	MaxUDPayload int
	// UnderMTU is the MTU of the underlay that Port reports, in octets. Zero means 9000.
	UnderMTU int
	// Window is the window of RC queue pairs in packets. Zero means the engine's default.
	Window int
}

// A Port is one simulated provider.
type Port struct {
	f    *Fabric
	opts PortOptions
	port verbs.Port

	closed, down bool
	busyUntil    time.Time

	regions map[uint32]*region
	nextVA  uint64
	qps     map[ib.QPN]*qp
	order   []*qp // the values of qps, oldest first, because a map has no order
	cqs     []*cq
	events  chan verbs.Event
	mads    chan *verbs.MAD
	tap     verbs.Tap
	notify  func()
	told    bool // notify is due at the current time

	count struct {
		badPacket, badICRC, noQP, madDrops, eventDrops uint64
		gone                                           engine.Counters // of QPs destroyed
	}
}

var _ verbs.Provider = (*Port)(nil)

// NewPort adds a port. A port that was closed may be replaced by one with the
// same GID.
func (f *Fabric) NewPort(opts PortOptions) *Port {
	opts.MTU = cmp.Or(opts.MTU, ib.MTU4096)
	opts.MaxUDPayload = cmp.Or(opts.MaxUDPayload, 4096)
	opts.UnderMTU = cmp.Or(opts.UnderMTU, 9000)
	if opts.GUID == 0 {
		opts.GUID = ib.GUID(f.rnd.Uint64() | 1)
	}
	if len(opts.PKeys) == 0 {
		opts.PKeys = []ib.PKey{ib.DefaultPKey}
	}
	p := &Port{f: f, opts: opts,
		port: verbs.Port{Active: true, GIDs: []ib.GID{opts.GID}, GUID: opts.GUID, PKeys: opts.PKeys, MTU: opts.MTU,
			UnderlayIf: "sim", UnderMTU: opts.UnderMTU},
		regions: make(map[uint32]*region), nextVA: 0x10000, qps: make(map[ib.QPN]*qp),
		events: make(chan verbs.Event, maxEvents), mads: make(chan *verbs.MAD, maxMADs)}
	f.ports = append(slices.DeleteFunc(f.ports, func(o *Port) bool { return o.closed }), p)
	return p
}

// Notify makes the fabric call fn, as an event of its own, after something was put
// into Events or MADs.
func (p *Port) Notify(fn func()) { p.notify = fn }

// SetActive takes the link down or up.
func (p *Port) SetActive(up bool) {
	if p.down != up || p.closed {
		return
	}
	p.down, p.port.Active = !up, up
	kind := verbs.PortError
	if up {
		kind = verbs.PortActive
	}
	p.event(verbs.Event{Kind: kind})
}

// Caps implements [verbs.Provider].
func (p *Port) Caps() verbs.Caps {
	return verbs.Caps{Name: "sim", Device: p.opts.GID.String(), RC: true, UC: true, UD: true, SRQ: true, SRQForUC: true,
		RDMA: true, Inv: true, MAD: true, Multicast: true, MaxMessage: engine.MaxMessage,
		MaxUDPayload: p.opts.MaxUDPayload, MaxSGE: engine.MaxSGE, MaxQPDepth: maxDepth}
}

// Port implements [verbs.Provider].
func (p *Port) Port() verbs.Port {
	port := p.port
	port.GIDs, port.PKeys = slices.Clone(port.GIDs), slices.Clone(port.PKeys)
	return port
}

// CreateCQ implements [verbs.Provider].
func (p *Port) CreateCQ(int) (verbs.CQ, error) {
	if p.closed {
		return nil, verbs.ErrClosed
	}
	c := &cq{f: p.f}
	p.cqs = append(p.cqs, c)
	return c, nil
}

// CreateSRQ implements [verbs.Provider].
func (p *Port) CreateSRQ(init verbs.SRQInit) (verbs.SRQ, error) {
	switch {
	case p.closed:
		return nil, verbs.ErrClosed
	case init.Depth < 1 || init.Depth > maxDepth || init.MaxSGE > engine.MaxSGE:
		return nil, verbs.ErrInvalid
	}
	return &srq{RecvRing: engine.NewRecvRing(init.Depth, init.MaxSGE)}, nil
}

// CreateAH implements [verbs.Provider].
func (p *Port) CreateAH(attr verbs.AHAttr) (verbs.AH, error) {
	if p.closed {
		return nil, verbs.ErrClosed
	}
	attr = p.complete(attr)
	if attr.DGID.IsZero() || attr.DGID.Is4() != attr.SGID.Is4() {
		return nil, verbs.ErrInvalid
	}
	return &ah{attr}, nil
}

// complete fills in the defaults of an address.
func (p *Port) complete(attr verbs.AHAttr) verbs.AHAttr {
	attr.SGID = cmp.Or(attr.SGID, p.opts.GID)
	attr.HopLimit = cmp.Or(attr.HopLimit, 64)
	return attr
}

// MADPort implements [verbs.Provider].
func (p *Port) MADPort() verbs.MADPort { return (*madPort)(p) }

// Events implements [verbs.Provider].
func (p *Port) Events() <-chan verbs.Event { return p.events }

// SetTap implements [verbs.Provider].
func (p *Port) SetTap(t verbs.Tap) { p.tap = t }

// Counters implements [verbs.Provider].
func (p *Port) Counters(fn func(name string, value uint64)) {
	sum := p.count.gone
	for _, q := range p.order {
		counters.Add(&sum, q.eng.Counters())
	}
	fn("bad_packets", p.count.badPacket)
	fn("bad_icrc", p.count.badICRC)
	fn("no_qp", p.count.noQP)
	fn("mad_drops", p.count.madDrops)
	fn("event_drops", p.count.eventDrops)
	counters.Each(&sum, fn)
}

// Close implements [verbs.Provider].
func (p *Port) Close() error {
	if p.closed {
		return verbs.ErrClosed
	}
	for len(p.order) > 0 {
		p.order[len(p.order)-1].Destroy()
	}
	for _, c := range p.cqs {
		c.closed = true
	}
	p.closed, p.notify = true, nil
	close(p.events)
	close(p.mads)
	return nil
}

func (p *Port) event(ev verbs.Event) {
	select {
	case p.events <- ev:
		p.tell()
	default:
		p.count.eventDrops++
	}
}

func (p *Port) tell() {
	if p.notify == nil || p.told {
		return
	}
	p.told = true
	p.f.At(p.f.now, func() {
		if p.told = false; p.notify != nil {
			p.notify()
		}
	})
}

// attached reports whether a QP of p is attached to mgid.
func (p *Port) attached(mgid ib.GID) bool {
	return slices.ContainsFunc(p.order, func(q *qp) bool { return q.groups[mgid] })
}

// header makes the IP and UDP headers for a path.
func header(attr *verbs.AHAttr, src, dst ib.QPN) roce.IPHeader {
	return roce.IPHeader{Src: attr.SGID.Addr(), Dst: attr.DGID.Addr(), TrafficClass: attr.TrafficClass,
		HopLimit: attr.HopLimit, FlowLabel: 0, SrcPort: roce.SourcePort(attr.FlowLabel, src, dst)}
}

// send makes an IP packet of h and covered, the octets from BTH through pad, and sends it.
func (p *Port) send(h roce.IPHeader, covered []byte) {
	ip := h.Append(make([]byte, 0, h.Len()+len(covered)+roce.ICRCLen), len(covered)+roce.ICRCLen)
	ip = append(append(ip, covered...), 0, 0, 0, 0)
	if err := rocetest.Seal(ip); err != nil {
		panic(err) // we made it
	}
	if p.tap != nil {
		p.tap(true, ip)
	}
	if !p.down {
		p.f.transmit(p, ib.GIDFromAddr(h.Dst), ip)
	}
}

// input takes one IP packet from the network.
func (p *Port) input(ip []byte) {
	h, payload, err := rocetest.ParseIP(ip)
	if err != nil {
		p.count.badPacket++
		return
	}
	if ok, err := rocetest.CheckIP(ip); !ok || err != nil {
		p.count.badICRC++
		return
	}
	if p.tap != nil {
		p.tap(false, ip)
	}
	var pkt roce.Packet
	if err := pkt.Parse(payload); err != nil {
		p.count.badPacket++
		return
	}
	src := engine.Source{Src: ib.GIDFromAddr(h.Src), Dst: ib.GIDFromAddr(h.Dst)}
	h.PutGRH(src.GRH[:], len(payload))
	switch n := pkt.BTH.DestQPN(); {
	case n == ib.QPNGSI:
		p.inputMAD(&pkt, &src)
	case n == ib.QPNMulticast:
		for _, q := range slices.Clone(p.order) {
			if q.groups[src.Dst] && q.eng.Transport() == ib.UD {
				q.input(&pkt, &src)
			}
		}
	default:
		q := p.qps[n]
		if q == nil || src.Dst.IsMulticast() {
			p.count.noQP++
			return
		}
		q.input(&pkt, &src)
	}
}
