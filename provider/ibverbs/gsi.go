package ibverbs

import (
	"encoding/binary"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// This file shares the CM messages of a port among the Devices of a process. The kernel allows one
// receiver of class 7 on a port, but a port may have several interfaces.

// Offsets of the fields that tell which user a CM message is for (IBA 12.6).
const (
	attrAt       = 16
	firstCommID  = 24 // the sender's ID; in a SIDR_REP the receiver's
	secondCommID = 28 // the receiver's ID, except in a REQ or SIDR_REQ
	serviceIDAt  = 32 // of a REQ
	sidrServeAt  = 40 // of a SIDR_REQ
)

// maxCommIDs bounds the communication IDs that a gsi remembers with their user. It forgets the
// oldest first. Messages with a forgotten ID go to a user in their partition.
const maxCommIDs = 1 << 16

// A cmView holds the functions by which a gsi asks one of its users.
type cmView struct {
	gids  func() gidTable
	pkeys func() []ib.PKey
	// serves reports whether the user has that UD QP, and inPartition whether it has any UD QP in
	// that partition.
	serves      func(ib.QPN) bool
	inPartition func(ib.PKey) bool
}

// A gsi is QP 1 of a port, shared by its users.
type gsi struct {
	node string
	raw  *madPort
	done chan struct{}

	mu     sync.Mutex
	users  []*gsiUser // the first gets messages that no user claims
	owners map[uint32]*gsiUser
	ids    []uint32 // the keys of owners, oldest first until they wrap
	next   int      // index in ids of the next one to replace
}

// A gsiUser is one user's access to QP 1. It implements [verbs.MADPort].
type gsiUser struct {
	cmView
	gsi     *gsi
	in      chan *verbs.MAD
	dropped atomic.Uint64
}

var _ verbs.MADPort = (*gsiUser)(nil)

// shareMADs adds a user of QP 1 of the port whose umad node is node. The first user's call opens QP
// 1 with open.
func shareMADs(node string, open func(gids func() gidTable, pkeys func() []ib.PKey) (*madPort, error),
	v cmView) (*gsiUser, error) {
	shared.Lock()
	defer shared.Unlock()
	if g := shared.gsi[node]; g != nil {
		return g.add(v), nil
	}
	g := &gsi{node: node, done: make(chan struct{}), owners: map[uint32]*gsiUser{}}
	u := g.add(v) // open's functions ask this user
	var err error
	if g.raw, err = open(g.gids, g.pkeys); err != nil {
		return nil, err
	}
	go g.serve()
	shared.gsi[node] = g
	return u, nil
}

func (g *gsi) add(v cmView) *gsiUser {
	g.mu.Lock()
	defer g.mu.Unlock()
	u := &gsiUser{cmView: v, gsi: g, in: make(chan *verbs.MAD, madQueue)}
	g.users = append(g.users, u)
	return u
}

// gids returns the GIDs of all users, those of the first one first. A user may have some of the port's only.
func (g *gsi) gids() (t gidTable) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, u := range g.users {
		for _, e := range u.gids() {
			if _, known := t.at(e.index); !known {
				t = append(t, e)
			}
		}
	}
	return t
}

// pkeys returns the P_Keys of the port, of which all users have all.
func (g *gsi) pkeys() []ib.PKey {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.users) == 0 {
		return nil
	}
	return g.users[0].pkeys()
}

// MADs implements [verbs.MADPort].
func (u *gsiUser) MADs() <-chan *verbs.MAD { return u.in }

// SendMAD implements [verbs.MADPort].
func (u *gsiUser) SendMAD(m *verbs.MAD) error {
	u.gsi.learn(u, m)
	return u.gsi.raw.SendMAD(m)
}

// learn notes that the communication ID in a message that u sends belongs to u.
func (g *gsi) learn(u *gsiUser, m *verbs.MAD) {
	id := binary.BigEndian.Uint32(m.Data[firstCommID:])
	if id == 0 || attrOf(m) == mad.AttrSIDRREP {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, known := g.owners[id]; !known {
		if len(g.ids) < maxCommIDs {
			g.ids = append(g.ids, id)
		} else {
			delete(g.owners, g.ids[g.next])
			g.ids[g.next] = id
			g.next = (g.next + 1) % maxCommIDs
		}
	}
	g.owners[id] = u
}

func attrOf(m *verbs.MAD) mad.AttrID { return mad.AttrID(binary.BigEndian.Uint16(m.Data[attrAt:])) }

// serve gives each message that comes in to its user.
func (g *gsi) serve() {
	defer close(g.done)
	for m := range g.raw.MADs() {
		g.give(m)
	}
}

func (g *gsi) give(m *verbs.MAD) {
	g.mu.Lock()
	defer g.mu.Unlock()
	u := g.userOf(m)
	if u == nil {
		return
	}
	if m.Path.DLID != 0 && !m.Path.GRH { // the packet does not say which GID of the port it is for
		if e, ok := u.gids().source(ib.GID{}, ib.GID{}); ok {
			m.Local, m.Path.SGID = e.gid, e.gid
		}
	}
	select {
	case u.in <- m:
	default:
		u.dropped.Add(1)
	}
}

// userOf returns the user that gets a message. For a REQ or SIDR_REQ, that is the user with the UD
// QP that the service ID names. For another message, it is the user of our communication ID in it.
// If there is no such user, the message goes to the first user in its partition, else to the first
// user of all.
func (g *gsi) userOf(m *verbs.MAD) *gsiUser {
	var u *gsiUser
	switch id := binary.BigEndian.Uint32; attrOf(m) {
	case mad.AttrREQ:
		u = g.serving(m.Data[serviceIDAt:])
	case mad.AttrSIDRREQ:
		u = g.serving(m.Data[sidrServeAt:])
	case mad.AttrSIDRREP:
		u = g.owners[id(m.Data[firstCommID:])]
	default:
		u = g.owners[id(m.Data[secondCommID:])]
	}
	if u != nil {
		return u
	}
	if i := slices.IndexFunc(g.users, func(u *gsiUser) bool { return u.inPartition(m.PKey) }); i >= 0 {
		return g.users[i]
	}
	if len(g.users) == 0 {
		return nil
	}
	return g.users[0]
}

// serving returns the user that has the UD QP which a service ID names; nil if there is none.
func (g *gsi) serving(id []byte) *gsiUser {
	form, qpn := serviceid.Parse(serviceid.ID(binary.BigEndian.Uint64(id)))
	if form == serviceid.Other {
		return nil
	}
	if i := slices.IndexFunc(g.users, func(u *gsiUser) bool { return u.serves(qpn) }); i >= 0 {
		return g.users[i]
	}
	return nil
}

// close ends one user's use of QP 1. The last user closes QP 1.
func (u *gsiUser) close() {
	shared.Lock()
	defer shared.Unlock()
	g := u.gsi
	g.mu.Lock()
	i := slices.Index(g.users, u)
	if i < 0 { // closed before
		g.mu.Unlock()
		return
	}
	g.users = slices.Delete(g.users, i, i+1)
	maps.DeleteFunc(g.owners, func(_ uint32, owner *gsiUser) bool { return owner == u })
	g.ids = slices.DeleteFunc(g.ids, func(id uint32) bool { return g.owners[id] == nil })
	g.next = 0
	close(u.in)
	last := len(g.users) == 0
	g.mu.Unlock()
	if last {
		delete(shared.gsi, g.node)
		g.raw.close()
		<-g.done
	}
}
