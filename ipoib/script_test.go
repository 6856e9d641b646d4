package ipoib

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/script"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A scene is a script in progress. Flush left goes in:
//
//	host a mode=uc mtu=9000    a host, 10.0.0.1 and fd00::1; options as in host
//	host b linux               Linux; "deaf" is one that listens on neither service ID
//	a resolve b                address resolution without a packet
//	a ping b 9000 nodf         a packet; b may be an address; with DF unless it says nodf, and
//	                           by UD, whatever there is, with ud
//	a stream b 100 1m          a packet a second for so long
//	a dial b, a send b 3000    Linux opens its own connection, and sends on it
//	a die, a boot qpn=777      a crash, and a start
//	a down, a up, a shutdown   of the interface
//	a error b                  the queue pair of a's connection to b fails
//	a noqp on                  no queue pair can be made
//	b forge a mtu=9000         a REQ to a in the name of b, with that Receive MTU
//	a address +10.0.0.9/24     and with a minus: the address goes
//	a route 0.0.0.0/0 b        a route of the kernel by way of b, or of an address
//	a devicemtu 9000           the MTU of the device
//	a legacy b                 a takes b for a legacy peer
//	lose b REQ                 the next REQ of b; "lose any all": the next message of anybody
//	lose b REQ always          all of them until "heal", as "lose everything", IP packets too
//	delay b RTU 1.5s           the next RTU of b takes that much longer
//	show, show a               connections and host routes
//	counters a icmp drop       those of a that are not zero and begin with one of these; kernel_flushes
//	                           is how often the kernel was told to forget MTUs that it had learnt
//	explain a 10.0.0.2         how a sends there
//	peers a, addresses a       the peers that it has a record of, and its addresses
//	paths a                    its data path: where packets go, and by what
//
// A host after anything else begins a new world; the first line that is no host lets
// three seconds pass in silence, so that duplicate address detection is over. What takes
// no time comes after the line, and "at +1s" precedes what comes a second later.
//
// Of what is sent the script shows CM messages, ARP and ND, each with who sent it; an
// IP packet is shown where it arrives, and by what. "again" is a message that is
// repeated.
type scene struct {
	t      *testing.T
	w      *world
	booted bool
	out    []string
	start  time.Time // of the line at hand
	at     time.Time // of what was said last
	fates  []*fate
	sent   map[mad.Message]string
	inband map[*node]int
	qps    map[*node][]ib.QPN
	pings  []ping
}

// A fate is what becomes of messages.
type fate struct {
	from  string // a host, or "any"
	what  string // "REQ", or "all"
	delay time.Duration
	lost  bool
	every bool
}

// A ping is a packet that a host was told to send.
type ping struct {
	from *node
	pkt  []byte
}

var errLine = errors.New("unknown line")

// playScripts runs the scripts of testdata that pattern matches. They are reviewed as
// they are; -update rewrites what comes out.
func playScripts(t *testing.T, pattern string) {
	t.Helper()
	script.Run(t, "testdata/"+pattern+".txt", func(t *testing.T) script.Machine { return &scene{t: t} })
}

// Do carries out one line.
func (s *scene) Do(line string) ([]string, error) {
	f := strings.Fields(line)
	if f[0] == "host" {
		return nil, s.host(f[1:])
	}
	if s.w == nil {
		return nil, errors.New("there is no host")
	}
	s.boot()
	s.start, s.at = s.w.now, s.w.now
	err := s.command(f)
	return s.said(), err
}

// Pass lets time pass.
func (s *scene) Pass(d time.Duration) []string {
	s.boot()
	s.start, s.at = s.w.now, s.w.now
	s.w.run(d)
	return s.said()
}

func (s *scene) said() []string {
	out := s.out
	s.out = nil
	return out
}

// host adds a host.
func (s *scene) host(f []string) error {
	if s.w == nil || s.booted {
		s.booted = false
		s.w = newWorld(s.t, 1)
		s.w.delay = 1 // what leaves together crosses
		s.fates, s.pings, s.sent = nil, nil, map[mad.Message]string{}
		s.inband, s.qps = map[*node]int{}, map[*node][]ib.QPN{}
	}
	a, i := args(script.Args(f[1:])), hostNumber(f[0])
	if _, ok := a["linux"]; ok {
		n := s.w.linux(i)
		if _, uc := a["uc"]; uc {
			n.legacy.p.Announce(encap.FlagRC | encap.FlagUC)
		}
		return nil
	}
	if _, ok := a["deaf"]; ok {
		s.w.foreign(i, foreign.Options{Deaf: true})
		return nil
	}
	mode, err := ParseMode(a.text("mode", "rc"))
	if err != nil {
		return err
	}
	o := Options{Mode: mode, ReceiveMTU: a.dec("mtu"), UDMTU: a.dec("udmtu")}
	_, o.LinuxFirst = a["linuxfirst"]
	if a["cm"] == "gsi" {
		o.CMTransport = CMGSI
	}
	if a["idle"] == "never" {
		o.Idle = -1
	} else if o.Idle, err = time.ParseDuration(a.text("idle", "0s")); err != nil {
		return err
	}
	n := s.w.node(i, o)
	_, noIPv6 := a["noipv6"]
	n.f.ipv6 = n.f.ipv6 && !noIPv6
	n.pathTo, err = pathMTU(a.text("path", "0"))
	return err
}

// args are the options of a line: "mode=uc" and "linux".
type args map[string]string

func (a args) text(key, def string) string { return script.Text(a, key, def) }

func (a args) dec(key string) int { return script.Decimal(a, key, 0) }

// pathMTU reads a path MTU in octets; none is zero.
func pathMTU(s string) (ib.MTU, error) {
	for m := ib.MTU256; m <= ib.MTU4096; m++ {
		if strconv.Itoa(m.Octets()) == s {
			return m, nil
		}
	}
	if s != "0" {
		return 0, fmt.Errorf("%q is no path MTU", s)
	}
	return 0, nil
}

// boot gives the hosts time for duplicate address detection.
func (s *scene) boot() {
	if s.booted {
		return
	}
	s.booted = true
	s.w.run(3 * time.Second)
	s.w.dropMAD, s.w.onFrame, s.w.onPacket, s.w.onNote = s.message, s.frame, s.packet, s.note
	for _, n := range s.w.nodes {
		s.inband[n] = len(n.inband)
	}
}

// node returns the host of that name, or that has that address.
func (s *scene) node(name string) (*node, error) {
	for _, n := range s.w.nodes {
		if n.name == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("there is no host %q", name)
}

// addr returns an address that is written out, or the IPv4 address of a host.
func (s *scene) addr(name string) (string, error) {
	if a, err := netip.ParseAddr(name); err == nil {
		return a.String(), nil
	}
	n, err := s.node(name)
	if err != nil {
		return "", err
	}
	return address(n), nil
}

// address is the first IPv4 address of a host.
func address(n *node) string { return fmt.Sprintf("10.0.0.%d", hostNumber(n.name)) }

// hostNumber is the number of a host in its addresses: 1 of a.
func hostNumber(name string) int { return int(name[0]-'a') + 1 }

func (s *scene) command(f []string) error {
	switch f[0] {
	case "lose", "delay", "heal":
		return s.fate(f)
	case "show":
		for _, n := range s.w.nodes {
			if len(f) == 1 || f[1] == n.name {
				s.show(n)
			}
		}
		return nil
	}
	if len(f) < 2 {
		return errLine
	}
	switch f[0] {
	case "counters":
		return s.counters(f[1], f[2:])
	case "explain":
		return s.explain(f[1], f[2])
	case "peers", "addresses", "paths":
		return s.list(f[0], f[1])
	}
	n, err := s.node(f[0])
	if err != nil {
		return err
	}
	if n.legacy != nil {
		return s.linux(n, f[1:])
	}
	return s.user(n, f[1], f[2:])
}

// fate decides about messages to come.
func (s *scene) fate(f []string) error {
	switch {
	case f[0] == "heal":
		s.fates, s.w.loss = nil, 0
		return nil
	case len(f) > 1 && f[1] == "everything":
		s.w.loss = 1
		return nil
	case len(f) < 3:
		return errLine
	}
	x := &fate{from: f[1], what: f[2]}
	s.fates = append(s.fates, x)
	if f[0] == "lose" {
		x.lost, x.every = true, len(f) > 3 && f[3] == "always"
		return nil
	}
	var err error
	x.delay, err = time.ParseDuration(f[3])
	return err
}

// user does what a host's kernel, user or driver does.
func (s *scene) user(n *node, verb string, f []string) error {
	switch verb {
	case "die":
		n.dead = true
		return nil
	case "boot":
		a := args(script.Args(f))
		if a["qpn"] != "" {
			n.opt.Link.QPN = ib.QPN(script.Hex(a, "qpn", 0))
		}
		n.boot()
		return nil
	case "down", "up":
		s.link(n, verb == "up")
		return nil
	case "shutdown":
		n.step(Shutdown{})
		return nil
	}
	if len(f) == 0 {
		return errLine
	}
	switch verb {
	case "noqp":
		n.noQP = f[0] == "on"
		return nil
	case "address":
		if p, ok := strings.CutPrefix(f[0], "+"); ok {
			n.addAddr(p)
		} else {
			n.delAddr(strings.TrimPrefix(f[0], "-"))
		}
		return nil
	case "route":
		gw, err := s.addr(f[1])
		n.addRoute(f[0], gw)
		return err
	case "devicemtu":
		m, err := strconv.Atoi(f[0])
		n.kernel(n.k.MTU(m))
		return err
	case "ping":
		return s.ping(n, f)
	case "stream":
		return s.stream(n, f)
	case "forge":
		return s.forge(n, f[0], args(script.Args(f[1:])))
	}
	m, err := s.node(f[0])
	if err != nil {
		return err
	}
	return s.peer(n, verb, m)
}

// link takes the interface down, as the kernel does, which drops the link-local
// address; or up.
func (s *scene) link(n *node, up bool) {
	own := n.f.addrs.own
	n.kernel(n.k.Up(up))
	if !up {
		n.delAddr(own.String())
	}
}

// peer does what concerns one peer.
func (s *scene) peer(n *node, verb string, m *node) error {
	switch verb {
	case "resolve":
		n.resolve(ip4(address(m)))
	case "legacy":
		p := n.f.peer(m.link())
		p.class, p.classUntil = ClassLegacy, s.w.now.Add(time.Hour)
	case "error":
		for _, c := range n.up() {
			if c.Peer.Key() == m.link() && c.Tx {
				n.step(QPError{Conn: c.Conn, Status: verbs.RetryExceeded})
			}
		}
	default:
		return errLine
	}
	return nil
}

// ping has n's kernel send a packet.
func (s *scene) ping(n *node, f []string) error {
	dst, err := s.addr(f[0])
	if err != nil || len(f) < 2 {
		return errors.Join(err, errLine)
	}
	size, err := strconv.Atoi(f[1])
	if err != nil {
		return err
	}
	pkt := n.echo(dst, size, !slices.Contains(f, "nodf"))
	s.pings = append(s.pings, ping{n, pkt})
	if m, err := s.node(f[0]); slices.Contains(f, "ud") {
		n.sendUD(m.link(), frame(pkt))
		return err
	}
	n.output(pkt)
	return nil
}

// stream has n's kernel send a packet every second.
func (s *scene) stream(n *node, f []string) error {
	if len(f) < 3 {
		return errLine
	}
	d, err := time.ParseDuration(f[2])
	for ; d > 0 && err == nil; d -= time.Second {
		err = s.ping(n, f[:2])
		s.w.run(time.Second)
	}
	return err
}

// forge has a REQ arrive in the name of n, who did not send it.
func (s *scene) forge(n *node, to string, a args) error {
	m, err := s.node(to)
	if err != nil {
		return err
	}
	req := honest(m, n)
	says(&req, n.opt.Link.QPN, uint32(cmp.Or(a.dec("mtu"), 65524)))
	req.PrivateData[0] = byte(script.Hex(a, "reserved", 0))
	s.w.inject(n, m, req)
	return nil
}

// linux has a kernel do something.
func (s *scene) linux(n *node, f []string) error {
	if len(f) < 2 {
		return errLine
	}
	m, err := s.node(f[1])
	if err != nil {
		return err
	}
	switch f[0] {
	case "dial":
		n.legacy.connect(m)
	case "send":
		size, err := strconv.Atoi(f[2])
		if err != nil {
			return err
		}
		pkt := mustEcho(address(n), address(m), size-28) // two headers
		s.pings = append(s.pings, ping{n, pkt})
		n.legacy.sendTo(m, pkt)
	default:
		return errLine
	}
	return nil
}
