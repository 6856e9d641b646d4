package control

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxPage is the most elements that one page may have.
const MaxPage = 10_000

// A Page selects elements of a list. ?peer=ADDRESS selects those of one peer, by its GID or by an IP
// address of the peer. ?limit=N selects at most N elements, in the order of their keys as text. ?after=KEY
// selects those after a page whose Next was KEY. All elements with the same key are on one page, so a page
// may have more than N. An element that is added or removed between two requests is missed or seen once,
// never twice. A key is an address, not an identifier of a connection.
type Page struct {
	Peer  netip.Addr // not valid: elements of all peers
	After string
	Limit int // zero sets no limit
}

// ParsePage reads the parameters of a request. get returns the parameter of a name.
func ParsePage(get func(string) string) (p Page, err error) {
	if s := get("peer"); s != "" {
		if p.Peer, err = netip.ParseAddr(s); err != nil {
			return Page{}, fmt.Errorf("peer %q is not an address", s)
		}
		p.Peer = p.Peer.WithZone("").Unmap()
	}
	p.After = get("after")
	if s := get("limit"); s != "" {
		if p.Limit, err = strconv.Atoi(s); err != nil || p.Limit < 1 || p.Limit > MaxPage {
			return Page{}, fmt.Errorf("limit %q: must be 1 to %d", s, MaxPage)
		}
	}
	return p, nil
}

func lastWord(s string) string { return s[strings.LastIndexByte(s, ' ')+1:] }

// has reports whether one of texts names the peer: an address, or a link-layer address,
// whose last word is the GID.
func (p Page) has(texts ...string) bool {
	for _, s := range texts {
		if a, err := netip.ParseAddr(lastWord(s)); err == nil && a.Unmap() == p.Peer {
			return true
		}
	}
	return false
}

// choose returns the elements of a page, and the key of the last one if more follow.
func choose[T any](p Page, all []T, key func(*T) string, has func(*T) bool) (page []T, next string) {
	page = all
	if p.Peer.IsValid() {
		page = slices.DeleteFunc(page, func(e T) bool { return !has(&e) })
	}
	if p.Limit == 0 && p.After == "" {
		return page, ""
	}
	slices.SortFunc(page, func(x, y T) int { return cmp.Compare(key(&x), key(&y)) })
	page = slices.DeleteFunc(page, func(e T) bool { return p.After != "" && key(&e) <= p.After })
	if p.Limit == 0 || len(page) <= p.Limit {
		return page, ""
	}
	n := p.Limit
	next = key(&page[n-1])
	for n < len(page) && key(&page[n]) == next {
		n++
	}
	if n == len(page) {
		next = ""
	}
	return page[:n], next
}

// Select reduces s to the peers of a page. Their key is gid.
func (s *Status) Select(p Page) {
	s.Peers, s.Next = choose(p, s.Peers, func(e *Peer) string { return e.GID }, func(e *Peer) bool {
		return p.has(e.GID) || p.has(e.Addresses...)
	})
}

// Select reduces c to the connections of a page. Their key is the GID of their peer.
func (c *Conns) Select(p Page) {
	c.Conns, c.Next = choose(p, c.Conns, func(e *Conn) string {
		return lastWord(e.Peer)
	}, func(e *Conn) bool { return p.has(e.Peer) })
}

// Select reduces n to the entries of a page. Their key is ip.
func (n *Neighbours) Select(p Page) {
	n.Neighbours, n.Next = choose(p, n.Neighbours, func(e *Neighbour) string { return e.IP },
		func(e *Neighbour) bool { return p.has(e.IP, e.LinkAddr) })
}

// Select reduces r to the next hops of a page. Their key is next_hop.
func (r *Routes) Select(p Page) {
	r.Routes, r.Next = choose(p, r.Routes, func(e *Route) string { return e.NextHop },
		func(e *Route) bool { return p.has(e.NextHop, e.Peer) })
}
