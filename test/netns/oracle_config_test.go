package netns

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
)

// The devices of a host of the oracle. Each has an address of its own; it is
// ifName's that the agent was given.
var oracleDevices = []string{ifName, "eth1", "eth2"}

const (
	arrival      = "in0" // packets to be forwarded come in here
	oracleTables = 4     // besides main, from firstTable on
	firstTable   = 100
	poolSize     = 64 // destinations of each family
	realSize     = 8  // of these, those that a host with an agent has
	gatewaySize  = 48 // of each device and family
)

// An addressBook has the addresses that a configuration can name, and a number
// for every one that can be a next hop.
type addressBook struct {
	pool     [2][]netip.Addr            // destinations, by family
	gateways [2]map[string][]netip.Addr // by device
	stray    [2][]netip.Addr            // gateways that no prefix of a device contains
	own      map[netip.Addr]bool        // addresses of the host with an agent
	ids      map[netip.Addr]int
	byID     []netip.Addr
}

func newAddressBook(r *rand.Rand) *addressBook {
	k := &addressBook{own: map[netip.Addr]bool{}, ids: map[netip.Addr]int{}}
	for f := range 2 {
		k.gateways[f] = map[string][]netip.Addr{}
	}
	for len(k.pool[0]) < poolSize {
		b, c, d := byte(1+r.IntN(2)), byte(r.IntN(4)), byte(1+r.IntN(200))
		v4 := netip.AddrFrom4([4]byte{10, b, c, d})
		if d%4 == 0 || d%4 == 3 || k.ids[v4] != 0 { // could be the broadcast address of a prefix
			continue
		}
		v6 := netip.MustParseAddr(fmt.Sprintf("fd0a:%x:%x::%x", b, c, d))
		k.pool[0], k.pool[1] = append(k.pool[0], v4), append(k.pool[1], v6)
		k.number(v4)
		k.number(v6)
		if n := len(k.pool[0]); n <= realSize {
			k.own[v4], k.own[v6] = true, true
		}
	}
	for i, dev := range oracleDevices {
		v4 := []string{"10.0.0.%d", "172.16.1.%d", "172.16.2.%d"}[i]
		v6 := []string{"fd00::%x", "fd16:1::%x", "fd16:2::%x"}[i]
		for x := 16; x < 16+gatewaySize; x++ {
			k.gateways[0][dev] = append(k.gateways[0][dev], k.number(netip.MustParseAddr(fmt.Sprintf(v4, x))))
			k.gateways[1][dev] = append(k.gateways[1][dev], k.number(netip.MustParseAddr(fmt.Sprintf(v6, x))))
		}
	}
	for x := 16; x < 24; x++ {
		k.stray[0] = append(k.stray[0], k.number(netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", x))))
		k.stray[1] = append(k.stray[1], k.number(netip.MustParseAddr(fmt.Sprintf("fe80::%x", x))))
	}
	for _, a := range []string{"10.0.0.2", "fd00::2"} {
		k.own[k.number(netip.MustParseAddr(a))] = true
	}
	return k
}

func (k *addressBook) number(a netip.Addr) netip.Addr {
	if _, known := k.ids[a]; !known {
		k.byID = append(k.byID, a)
		k.ids[a] = len(k.byID)
	}
	return a
}

// find returns the address of a number.
func (k *addressBook) find(id int) (a netip.Addr, ok bool) {
	if id < 1 || id > len(k.byID) {
		return a, false
	}
	return k.byID[id-1], true
}

// A setting is one command of ip, and the one that takes it back.
type setting struct{ on, off string }

// A hopAt is one next hop.
type hopAt struct {
	dev  string
	addr netip.Addr
}

// An oracleConfig is a random configuration of routes, in the words of ip -batch.
type oracleConfig struct {
	r       *rand.Rand
	book    *addressBook
	now     []setting // in force
	sourced [2]bool   // rules look at the source, by family
	groups  map[string][]hopAt
	objects map[int]hopAt     // next-hop objects with a gateway
	members map[string][]int  // of the groups that are next-hop objects
	sources [2][]netip.Addr   // addresses of the host
	undone  map[string]func() // what it means that a line of a change is refused

	subnets map[netip.Prefix]string // and the devices that have them
	used    map[string]int          // gateways taken, by family and device
	metric  int
	object  int
}

func newOracleConfig(seed uint64, book *addressBook) *oracleConfig {
	c := &oracleConfig{r: rand.New(rand.NewPCG(seed, 1)), book: book, groups: map[string][]hopAt{},
		objects: map[int]hopAt{}, undone: map[string]func(){},
		members: map[string][]int{}, used: map[string]int{}, subnets: map[netip.Prefix]string{}}
	c.sources[0] = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("172.16.1.1")}
	c.sources[1] = []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd16:1::1")}
	rules := c.r.IntN(2) == 0
	for f := range 2 {
		for range c.r.IntN(5) {
			c.address(f)
		}
		for range 6 + c.r.IntN(10) {
			c.route(f, rules)
		}
		if rules {
			for range 1 + c.r.IntN(4) {
				c.rule(f)
			}
		}
	}
	return c
}

// text is the batch that makes the configuration.
func (c *oracleConfig) text() string {
	var b strings.Builder
	for _, s := range c.now {
		fmt.Fprintln(&b, s.on)
	}
	return b.String()
}

// undo is the batch that takes it back.
func (c *oracleConfig) undo() string {
	var b strings.Builder
	for _, s := range slices.Backward(c.now) {
		if s.off != "" {
			fmt.Fprintln(&b, s.off)
		}
	}
	return b.String()
}

func (c *oracleConfig) add(on, off string) { c.now = append(c.now, setting{on, off}) }

func pick[T any](r *rand.Rand, of []T) T { return of[r.IntN(len(of))] }

func (c *oracleConfig) device() string {
	return pick(c.r, []string{ifName, ifName, ifName, "eth1", "eth2"})
}

// address puts an address on a device, sometimes with two lengths at once.
func (c *oracleConfig) address(f int) {
	near := pick(c.r, c.book.pool[f]).As16()
	// Not the first of four: it can be the anycast address of routers in a subnet, which a
	// kernel takes as a source or not, by what the subnet had before.
	near[15] = pick(c.r, []byte{241, 242, 243, 245, 246, 247, 249})
	a := netip.AddrFrom16(near).Unmap()
	if slices.Contains(c.sources[f], a) {
		return
	}
	had := len(c.now)
	lengths, tail := [][]int{{30, 28, 24, 22, 16, 15}, {126, 120, 64, 48, 46}}[f], []string{"", " nodad"}[f]
	dev := c.device()
	for range 1 + c.r.IntN(2)*c.r.IntN(2) {
		n := pick(c.r, lengths)
		// Of devices with the same subnet the kernel takes the one that had it first,
		// and the route with our metrics is made again.
		p, _ := a.Prefix(n)
		if on := c.subnets[p]; on != "" && on != dev {
			continue
		}
		c.subnets[p] = dev
		what := fmt.Sprintf("%s/%d dev %s", a, n, dev)
		c.add("addr add "+what+tail, "addr del "+what)
	}
	if len(c.now) > had { // else it may be an anycast address of a subnet, which kernels take as a source or not
		c.sources[f] = append(c.sources[f], a)
	}
}

func (c *oracleConfig) prefix(f int) netip.Prefix {
	p, _ := pick(c.r, c.book.pool[f]).Prefix(pick(c.r,
		[][]int{{0, 8, 14, 15, 16, 22, 23, 24, 25, 28, 30, 32}, {0, 16, 31, 32, 46, 48, 64, 120, 126, 128}}[f]))
	return p
}

// gateway takes one that the configuration does not have yet.
func (c *oracleConfig) gateway(f int, dev string) netip.Addr {
	key := fmt.Sprint(f, dev)
	c.used[key]++
	return c.book.gateways[f][dev][c.used[key]%gatewaySize]
}

// route adds one of any kind. Metrics differ, so no two routes are one by accident.
func (c *oracleConfig) route(f int, tables bool) {
	c.metric++
	where := fmt.Sprintf("metric %d", 10+(c.metric*37)%1009)
	if tables && c.r.IntN(2) == 0 {
		where += fmt.Sprintf(" table %d", firstTable+c.r.IntN(oracleTables))
	}
	tos := ""
	if f == 0 && c.r.IntN(8) == 0 {
		tos = " tos " + pick(c.r, []string{"0x10", "0xb8"})
	}
	p, dev := c.prefix(f).String(), c.device()
	// Between a default route for a TOS and one for all the kernel goes back and forth from
	// packet to packet, as long as it does not know which gateway is alive
	// (fib_select_default in net/ipv4/fib_semantics.c).
	if p != "0.0.0.0/0" {
		where += tos
	}
	off := fmt.Sprintf("route del %s %s", p, where)
	add := func(kind, how string) { c.add(fmt.Sprintf("route add %s%s %s %s", kind, p, how, where), off) }
	switch c.r.IntN(13) {
	case 0, 1:
		add("", "dev "+dev)
	case 2, 3:
		add("", fmt.Sprintf("via %s dev %s", c.gateway(f, dev), dev))
	case 4:
		add("", fmt.Sprintf("via %s", c.gateway(f, dev)))
	case 5:
		c.multipath(f, p, where, off)
	case 6:
		add("", fmt.Sprintf("nhid %d", c.nextHop(f, dev)))
	case 7:
		add("", fmt.Sprintf("nhid %d", c.nextHopGroup(f)))
	case 8:
		kind := pick(c.r, []string{"blackhole ", "unreachable ", "prohibit "})
		c.add(fmt.Sprintf("route add %s%s %s", kind, p, where), fmt.Sprintf("route del %s%s %s", kind, p, where))
	case 9:
		if f == 0 {
			add("", fmt.Sprintf("via inet6 %s dev %s", c.gateway(1, dev), dev))
		} else {
			add("", fmt.Sprintf("via %s dev %s", pick(c.r, c.book.stray[1]), dev)) // link-local
		}
	case 10:
		if f == 0 {
			add("", fmt.Sprintf("via %s dev %s onlink", pick(c.r, c.book.stray[0]), dev))
		} else {
			c.appended(p, where, off)
		}
	case 11:
		add("", fmt.Sprintf("via %s dev %s", []string{"10.0.0.2", "fd00::2"}[f], ifName))
	case 12:
		if strings.Contains(where, "table") {
			c.add(fmt.Sprintf("route add throw %s %s", p, where), fmt.Sprintf("route del throw %s %s", p, where))
		} else {
			add("", "dev "+ifName)
		}
	}
}

func (c *oracleConfig) hops(f int) (hops []hopAt) {
	for range 2 + c.r.IntN(3) {
		dev := c.device()
		hops = append(hops, hopAt{dev, c.gateway(f, dev)})
	}
	return hops
}

func (c *oracleConfig) multipath(f int, p, where, off string) {
	hops := c.hops(f)
	text := ""
	for _, h := range hops {
		text += fmt.Sprintf(" nexthop via %s dev %s weight %d", h.addr, h.dev, 1+c.r.IntN(4))
	}
	c.groups[p+where] = hops
	c.add(fmt.Sprintf("route add %s %s%s", p, where, text), off)
}

// appended is an IPv6 route that becomes multipath by "ip route append".
func (c *oracleConfig) appended(p, where, off string) {
	hops := c.hops(1)
	for i, h := range hops {
		verb := "add"
		if i > 0 {
			verb, off = "append", ""
		}
		c.add(fmt.Sprintf("route %s %s via %s dev %s %s", verb, p, h.addr, h.dev, where), off)
	}
	c.groups[p+where] = hops
}

func (c *oracleConfig) nextHop(f int, dev string) int {
	c.object++
	h := hopAt{dev, c.gateway(f, dev)}
	c.objects[c.object] = h
	c.add(fmt.Sprintf("nexthop add id %d via %s dev %s", c.object, h.addr, h.dev),
		fmt.Sprintf("nexthop del id %d", c.object))
	return c.object
}

func (c *oracleConfig) nextHopGroup(f int) int {
	var ids []int
	var list []string
	for range 2 + c.r.IntN(2) {
		id := c.nextHop(f, c.device())
		ids = append(ids, id)
		list = append(list, fmt.Sprintf("%d,%d", id, 1+c.r.IntN(4)))
	}
	c.object++
	c.members[fmt.Sprint(c.object)] = ids
	c.add(fmt.Sprintf("nexthop add id %d group %s", c.object, strings.Join(list, "/")),
		fmt.Sprintf("nexthop del id %d", c.object))
	return c.object
}

func (c *oracleConfig) rule(f int) {
	any := []string{"0.0.0.0/0", "::/0"}[f]
	what := "from " + any
	switch c.r.IntN(6) {
	case 0:
		what = "from " + pick(c.r, c.sources[f]).String()
		c.sourced[f] = true
	case 1:
		what = "from " + pick(c.r, oracleForeign[f]).String()
		c.sourced[f] = true
	case 2, 3:
		what += " dsfield " + pick(c.r, []string{"0x10", "0xb8"})
	case 4:
		what += " to " + c.prefix(f).String()
	case 5:
		what += " ipproto udp dport 10"
	}
	c.metric++
	end := fmt.Sprintf("lookup %d", firstTable+c.r.IntN(oracleTables))
	switch c.r.IntN(8) {
	case 0:
		end = "lookup main suppress_prefixlength 0"
	case 1:
		end = pick(c.r, []string{"blackhole", "unreachable", "prohibit"})
	}
	text := fmt.Sprintf("%s pref %d %s", what, 1000+c.metric, end)
	c.add("rule add "+text, "rule del "+text)
}

// change returns a batch of changes, after which text would make what there is.
func (c *oracleConfig) change() string {
	before := len(c.now)
	var b strings.Builder
	for range 1 + c.r.IntN(4) {
		f := c.r.IntN(2)
		switch c.r.IntN(7) {
		case 0:
			c.address(f)
		case 1, 2:
			c.route(f, true)
		case 3:
			c.rule(f)
		case 4, 5: // something goes; what depended on it goes with it
			if i := c.r.IntN(before); c.now[i].off != "" {
				fmt.Fprintln(&b, c.now[i].off)
			}
		case 6:
			if c.object == 0 {
				continue
			}
			id := 1 + c.r.IntN(c.object)
			h, ok := c.objects[id]
			if !ok {
				continue
			}
			f := 0
			if h.addr.Is6() {
				f = 1
			}
			old := h
			h.addr = c.gateway(f, h.dev)
			c.objects[id] = h
			line := fmt.Sprintf("nexthop replace id %d via %s dev %s", id, h.addr, h.dev)
			c.undone[line] = func() { c.objects[id] = old }
			fmt.Fprintln(&b, line)
		}
	}
	for _, s := range c.now[before:] {
		fmt.Fprintln(&b, s.on)
	}
	return b.String()
}

// refused takes in that ip refused these lines.
func (c *oracleConfig) refused(lines []string) {
	for _, line := range lines {
		if undo := c.undone[line]; undo != nil {
			undo()
		}
	}
}

// alike reports whether two next hops are those of one multipath route.
func (c *oracleConfig) alike(a, b hopAt) bool {
	for _, g := range c.groups {
		if slices.Contains(g, a) && slices.Contains(g, b) {
			return true
		}
	}
	for _, ids := range c.members {
		var g []hopAt
		for _, id := range ids {
			g = append(g, c.objects[id])
		}
		if slices.Contains(g, a) && slices.Contains(g, b) {
			return true
		}
	}
	return false
}
