package sa

import (
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	wire "ipoibcm/wire/sa"
)

// FuzzStep feeds a Client events made from octets: a user, a port, and an
// administrator that answers, refuses, lies and keeps silent. Nothing contradicts
// itself, what is asked for is answered once, and with an administrator that
// behaves everything comes to rest as the user wants it.
func FuzzStep(f *testing.F) {
	f.Add([]byte{0, 1, 2, 1, 2, 2, 9, 0, 9, 0, 9, 0, 4, 1, 9, 0})
	f.Add([]byte{0, 1, 2, 1, 9, 0, 3, 1, 9, 0, 1, 0, 9, 0, 8, 200, 8, 200})
	f.Add([]byte{0, 1, 5, 2, 9, 0, 10, 3, 10, 1, 11, 2, 12, 0, 6, 2, 9, 7})
	f.Fuzz(fuzzStep)
}

// TestRandomEvents is FuzzStep with many random sequences, for every test run.
func TestRandomEvents(t *testing.T) {
	for seed := range uint64(1500) {
		r := rand.New(rand.NewPCG(seed, 9))
		in := make([]byte, 300)
		for i := range in {
			in[i] = byte(r.Uint32())
		}
		fuzzStep(t, in)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// A user is what fuzzStep expects of a Client.
type user struct {
	t   *testing.T
	c   *Client
	now time.Time
	out []MAD // questions and answers of the Client, the last ones
	// asked are queries that are not answered, joined the groups that are to be
	// left or have been joined, with how.
	asked  map[PathKey]bool
	joined map[ib.GID]wire.JoinState
	left   map[ib.GID]int // Left that must still come
}

func fuzzStep(t *testing.T, in []byte) {
	u := &user{t: t, now: time.Unix(1000, 0), asked: map[PathKey]bool{}, joined: map[ib.GID]wire.JoinState{},
		left: map[ib.GID]int{}}
	u.c = New(Options{Rand: rand.NewPCG(1, 2), MaxGroups: 3, MaxPaths: 4, MaxInFlight: 2, MaxTries: 2,
		Refresh: 20 * time.Second})
	for i := 0; i+1 < len(in); i += 2 {
		u.event(in[i], in[i+1])
	}
	u.settle()
}

// step gives the Client one event and looks at what comes of it.
func (u *user) step(ev Event) {
	u.t.Helper()
	for _, a := range u.c.Step(nil, u.now, ev) {
		switch a := a.(type) {
		case SendMAD:
			if u.out = append(u.out, *a.MAD); len(u.out) > 8 {
				u.out = u.out[1:]
			}
		case PathFound:
			u.answered(a.Key)
			if a.Path.DGID != a.Key.DGID {
				u.t.Fatalf("path to %v for %v", a.Path.DGID, a.Key.DGID)
			}
		case PathFailed:
			u.answered(a.Key)
		case Joined:
			if u.joined[a.Group.MGID] == 0 {
				u.t.Fatalf("joined %v, which the user has left", a.Group.MGID)
			}
		case JoinFailed:
			if a.Cause == NoRoom || a.Cause == BadArgument {
				delete(u.joined, a.MGID)
			}
		case Left:
			if u.left[a.MGID]--; u.left[a.MGID] < 0 {
				u.t.Fatalf("left %v once too often", a.MGID)
			}
		}
	}
	if err := u.c.check(); err != nil {
		u.t.Fatalf("after %+v: %v", ev, err)
	}
}

func (u *user) answered(key PathKey) {
	if !u.asked[key] {
		u.t.Fatalf("path to %v answered twice, or never asked for", key.DGID)
	}
	delete(u.asked, key)
}

// event makes event k about x.
func (u *user) event(k, x byte) {
	group := ib.GID{0: 0xff, 1: 0x12, 15: x % 5}
	states := []wire.JoinState{wire.FullMember, wire.SendOnlyNonMember, wire.SendOnlyFullMember}
	switch k % 16 {
	case 0:
		u.step(SetPort{Port{Active: x&1 != 0, LID: ib.LID(4 + x>>7), SMLID: ib.LID(x >> 1 & 3),
			GID: ib.GID{0xfe, 0x80, 15: x >> 3 & 1}}})
	case 1:
		if x == 0xff {
			u.step(Finish{})
		}
		u.step(Reregister{})
	case 2, 3:
		s := states[int(x>>4)%3]
		if u.joined[group] == 0 && u.left[group] > 0 { // no Left need come
			u.left[group] = 0
		}
		u.joined[group] = s
		u.step(Join{MGID: group, PKey: 0xffff, State: s, Create: x&8 != 0, Params: Params{MTU: 4}})
	case 4:
		if u.joined[group] != 0 {
			delete(u.joined, group)
			u.left[group] = 1
		}
		u.step(Leave{MGID: group, Forget: x&8 != 0 && u.left[group] == 1})
	case 5, 6:
		key := PathKey{DGID: ib.GID{0xfe, 0x80, 15: x % 6}, PKey: 0xffff}
		u.asked[key] = true
		u.step(Query{key})
	case 7:
		if x&8 != 0 {
			u.step(Unsubscribe{wire.Trap(64 + x%4)})
			return
		}
		u.step(Subscribe{wire.Trap(64 + x%4)})
	case 8:
		u.now = u.now.Add(time.Duration(x) * 20 * time.Millisecond)
		u.step(Wake{})
	case 9, 10, 11, 12, 13:
		if len(u.out) > 0 {
			u.answer(u.out[int(x)%len(u.out)], x>>3)
		}
	case 14:
		n := wire.Notice{Generic: true, Trap: wire.Trap(64 + x%6)}
		copy(n.Details[6:], group[:])
		m := wire.Message{Header: wire.Header{Method: wire.MethodReport}, Record: n}
		mad := MAD{Peer: Address{LID: ib.LID(x >> 5)}}
		m.AppendBinary(mad.Data[:0])
		u.step(RecvMAD{&mad})
	default:
		u.now = u.now.Add(time.Duration(x) * time.Millisecond)
		u.step(Wake{})
	}
}

// answer answers q in way x: 0 to 15 as an administrator that agrees.
func (u *user) answer(q MAD, x byte) {
	var m wire.Message
	if err := m.UnmarshalBinary(q.Data[:]); err != nil {
		u.t.Fatalf("what was sent cannot be read: %v", err)
	}
	if m.Method.IsResponse() {
		return
	}
	m.Method = response(m.Method)
	m.Record = granted(m, args{})
	switch x {
	case 16:
		m.Status = wire.StatusBusy
	case 17, 18:
		m.Status = wire.StatusRedirect
		m.Record = wire.ClassPortInfo{Redirect: wire.Locator{LID: ib.LID(x - 16), QPN: 1}}
	case 19, 20, 21:
		m.Status = wire.Status(x-16) << 8
	case 22:
		q.Peer.LID++
	case 23:
		m.Record = wire.ClassPortInfo{}
	case 24:
		m.Method++
	case 25:
		m.TransactionID++
	}
	in := MAD{Peer: q.Peer}
	m.AppendBinary(in.Data[:0])
	if x == 26 {
		in.Data[1] = 7
	}
	u.step(RecvMAD{&in})
}

// settle lets an administrator answer everything for two minutes. Then everything
// is as the user wants it.
func (u *user) settle() {
	u.step(SetPort{Port{Active: true, LID: 4, SMLID: 1, GID: ib.GID{0xfe, 0x80, 15: 2}}})
	end := u.now.Add(2 * time.Minute)
	for steps := 0; u.now.Before(end); steps++ {
		if steps > 10_000 {
			u.t.Fatal("it does not come to rest")
		}
		for len(u.out) > 0 {
			q := u.out[0]
			u.out = u.out[1:]
			u.answer(q, 0)
		}
		due := u.c.Deadline()
		if due.IsZero() {
			break
		}
		u.now = due
		u.step(Wake{})
	}
	if len(u.asked) != 0 {
		u.t.Errorf("%d queries were never answered", len(u.asked))
	}
	for g, n := range u.left {
		if n != 0 {
			u.t.Errorf("%d Left of %v never came", n, g)
		}
	}
	members := u.c.Groups()
	if len(members) != len(u.joined) {
		u.t.Errorf("%d groups, want %d", len(members), len(u.joined))
	}
	for _, g := range members {
		if !g.Joined || g.Group.JoinState&u.joined[g.Join.MGID] == 0 {
			u.t.Errorf("%v: joined %v as %v, want %v", g.Join.MGID, g.Joined, g.Group.JoinState, u.joined[g.Join.MGID])
		}
	}
	if i := u.c.Info(); i.State != StateReady {
		u.t.Errorf("state: got %v, want ready", i.State)
	}
}
