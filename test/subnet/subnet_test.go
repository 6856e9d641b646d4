package subnet

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/simsm"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// TestBroadcastGroup: four components are enough to join the broadcast group; the
// answer says everything else about the link.
func TestBroadcastGroup(t *testing.T) {
	both(t, byDefault, sa.Options{}, func(t *testing.T, f fabric) {
		b := f.host("B")
		got := expectJoined(t, f, b, join(broadcast, wire.FullMember))
		want := wire.MCMemberRecord{MGID: broadcast, PortGID: b.gid(), QKey: ib.QKeyIPoIB, MLID: 0xc000,
			MTUSelector: wire.Exactly, MTU: ib.MTU2048, RateSelector: wire.Exactly, Rate: ib.Rate10G,
			LifeSelector: wire.Exactly, Life: 18, PKey: ib.DefaultPKey, Scope: 2, JoinState: wire.FullMember}
		// 4391-5-1, 4391-5-2
		if got != want {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
		if i := b.client.Info(); i.Class.CapabilityMask2&wire.Cap2SendOnlyFullMember == 0 {
			t.Errorf("capability: got %#x, want SendOnlyFullMember in it", i.Class.CapabilityMask2)
		}
		// Joining again is no error, and leaving after that is the end.
		f.step(b, sa.Reregister{})
		if !f.run(soon, func() bool { return b.client.Info().State == sa.StateReady && b.client.Info().InFlight == 0 }) {
			t.Fatal("it does not come to rest")
		}
		if len(b.told) > 2 { // StateChanged twice
			t.Errorf("joined again: told %v", b.told)
		}
		expectLeft(t, f, b, broadcast)
	})
}

// TestCreate: who asks with every component makes the group, and others find it.
func TestCreate(t *testing.T) {
	both(t, byDefault, sa.Options{}, func(t *testing.T, f fabric) {
		b, c, g := f.host("B"), f.host("C"), mgid(0xffff, 0xfb)
		expectRefused(t, f, b, join(g, wire.FullMember), wire.StatusInsufficientComponents, true)
		// Who only sends as a non-member cannot make it.
		expectRefused(t, f, b, create(g, wire.SendOnlyNonMember), wire.StatusInvalid, true)

		bc := expectJoined(t, f, b, join(broadcast, wire.FullMember))
		made := create(g, wire.FullMember)
		made.Params = sa.ParamsOf(bc) // 4391-10-4
		one := expectJoined(t, f, b, made)
		if one.MLID == bc.MLID {
			t.Errorf("MLID: got %#x, that of the broadcast group", one.MLID)
		}
		expect.Equal(t, one.QKey, bc.QKey, "QKey")
		expect.Equal(t, one.MTU, bc.MTU, "MTU")
		expect.Equal(t, one.Rate, bc.Rate, "Rate")
		two := expectJoined(t, f, c, join(g, wire.FullMember))
		if two.MLID != one.MLID {
			t.Errorf("MLID at C: got %#x, want %#x", two.MLID, one.MLID)
		}
		other := create(g, wire.FullMember)
		other.Params.QKey++
		d := f.host("D")
		expectRefused(t, f, d, other, wire.StatusInvalid, false)
		other = create(g, wire.FullMember)
		other.Params.SL = 1
		expectRefused(t, f, d, other, wire.StatusInvalid, false)

		// The group ends with its last member. 4391-10-6
		expectLeft(t, f, b, g)
		expectJoined(t, f, d, join(g, wire.FullMember))
		expectLeft(t, f, d, g)
		expectLeft(t, f, c, g)
		expectRefused(t, f, d, join(g, wire.FullMember), wire.StatusInsufficientComponents, true)
	})
}

// TestSendOnly: who only sends joins what others have made, learns by traps 66 and 67
// when it comes and goes, and does not keep it alive. A send-only full member does.
func TestSendOnly(t *testing.T) {
	both(t, byDefault, sa.Options{}, func(t *testing.T, f fabric) {
		b, c, g := f.host("B"), f.host("C"), mgid(0xffff, 0xfc)
		for _, trap := range []wire.Trap{wire.TrapGroupCreated, wire.TrapGroupDeleted} {
			f.step(b, sa.Subscribe{Trap: trap})
		}
		a := outcome(t, f, b, join(g, wire.SendOnlyNonMember))
		if j, ok := a.(sa.JoinFailed); !ok || !j.NoGroup {
			t.Fatalf("got %s, want JoinFailed: there is no group", text(a)) // 4391-10-2
		}
		if !f.run(soon, func() bool { return b.client.Info().InFlight == 0 }) {
			t.Fatal("the subscriptions are not answered")
		}
		b.told = nil
		expectJoined(t, f, c, create(g, wire.FullMember))
		if a := next(t, f, b); a != (sa.Noticed{Trap: wire.TrapGroupCreated, GID: g}) {
			t.Fatalf("C made the group: B got %s, want trap 66", text(a))
		}
		a = next(t, f, b)
		j, ok := a.(sa.Joined)
		if !ok {
			t.Fatalf("after trap 66: got %s, want Joined", text(a))
		}
		if j.Group.JoinState != wire.SendOnlyNonMember { // 4391-10-1, 4391-10-3
			t.Errorf("join state: got %v, want %v", j.Group.JoinState, wire.SendOnlyNonMember)
		}
		expectLeft(t, f, c, g)
		if a := next(t, f, b); a != (sa.Noticed{Trap: wire.TrapGroupDeleted, GID: g}) {
			t.Fatalf("C left the group: B got %s, want trap 67", text(a))
		}
		a = next(t, f, b)
		switch j, ok := a.(sa.JoinFailed); {
		case !ok:
			t.Errorf("after trap 67: ok is false")
		case j.Cause != sa.Deleted:
			t.Errorf("after trap 67: Cause is %v, want %v", j.Cause, sa.Deleted)
		case !j.NoGroup:
			t.Errorf("after trap 67: NoGroup is false, want true")
		}
		expectLeft(t, f, b, g)
		for _, trap := range []wire.Trap{wire.TrapGroupCreated, wire.TrapGroupDeleted} {
			f.step(b, sa.Unsubscribe{Trap: trap})
		}
		f.run(soon, func() bool { return b.client.Info().InFlight == 0 })

		// SendOnlyFullMember makes the group, as Linux does.
		if r := expectJoined(t, f, b, create(g, wire.SendOnlyFullMember)); r.JoinState != wire.SendOnlyFullMember {
			t.Errorf("join state: got %v, want %v", r.JoinState, wire.SendOnlyFullMember)
		}
		expectJoined(t, f, c, join(g, wire.FullMember))
		expectLeft(t, f, c, g)
		expectJoined(t, f, c, join(g, wire.FullMember))
	})
}

// TestStates: a membership grows and shrinks, and what is not wanted any more ends.
func TestStates(t *testing.T) {
	both(t, byDefault, sa.Options{}, func(t *testing.T, f fabric) {
		b, c, g := f.host("B"), f.host("C"), mgid(0xffff, 0xfd)
		expectJoined(t, f, c, create(g, wire.FullMember))
		if r := expectJoined(t, f, b, join(g, wire.SendOnlyNonMember)); r.JoinState != wire.SendOnlyNonMember {
			t.Errorf("send-only: got %v", r.JoinState)
		}
		if r := expectJoined(t, f, b, join(g, wire.FullMember)); r.JoinState&wire.FullMember == 0 {
			t.Errorf("full: got %v", r.JoinState)
		}
		f.run(soon, func() bool { return b.client.Info().InFlight == 0 })
		// B is a full member: the group outlives C.
		expectLeft(t, f, c, g)
		expectJoined(t, f, c, join(g, wire.FullMember))
		expectLeft(t, f, c, g)
		// And then only sends: it does not. (The last full member's Delete ends the group.)
		expectJoined(t, f, b, join(g, wire.SendOnlyNonMember))
		f.run(soon, func() bool { return b.client.Info().InFlight == 0 })
		expectRefused(t, f, c, join(g, wire.FullMember), wire.StatusInsufficientComponents, true)
	})
}

// TestPaths: from port to port, and what there is no path to.
func TestPaths(t *testing.T) {
	both(t, byDefault, sa.Options{FailedLife: time.Millisecond}, func(t *testing.T, f fabric) {
		b, d := f.host("B"), f.host("D")
		r, status := ask(t, f, b, d.gid(), ib.DefaultPKey)
		if status != 0 {
			t.Fatalf("path to D: %v", status)
		}
		want := verbs.Path{DGID: d.gid(), SGID: b.gid(), DLID: d.port().LID, SLID: b.port().LID, PKey: ib.DefaultPKey,
			MTU: ib.MTU2048, Rate: ib.Rate10G, Life: 18}
		if r != want { // 4391-9.1.2-2
			t.Errorf("got %+v\nwant %+v", r, want)
		}
		if _, status := ask(t, f, b, ib.GID{0: 0xfe, 1: 0x80, 8: 0xee, 15: 1},
			ib.DefaultPKey); status != wire.StatusNoRecords {
			t.Errorf("unknown GID: got %v, want %v", status, wire.StatusNoRecords)
		}
		if _, status := ask(t, f, b, d.gid(), 0x8005); status != wire.StatusNoRecords {
			t.Errorf("unknown P_Key: got %v, want %v", status, wire.StatusNoRecords)
		}
		// Both ends of a link that is away.
		f.setLink(d, false)
		f.step(b, sa.Reregister{}) // forgets what was found
		if !away(t, f, b, d.gid(), true) {
			t.Error("the path to D is there though its link is away")
		}
		f.setLink(d, true)
		if !away(t, f, b, d.gid(), false) {
			t.Error("the path to D does not come back with its link")
		}
	})
}

// away reports whether the path to dgid comes to be away, or there, within a while.
func away(t *testing.T, f fabric, h *host, dgid ib.GID, want bool) bool {
	for range 40 {
		if _, status := ask(t, f, h, dgid, ib.DefaultPKey); (status != 0) == want {
			return true
		}
		f.run(100*time.Millisecond, nil)
		f.step(h, sa.Reregister{})
	}
	return false
}

// TestPartitions: B and C are full members of 0x8001, D is a limited one. The answer
// has the P_Key of the group, whatever the membership of who asks.
func TestPartitions(t *testing.T) {
	both(t, partitions, sa.Options{}, func(t *testing.T, f fabric) {
		b, c, d := f.host("B"), f.host("C"), f.host("D")
		g := mgid(0x8001, 0xffffffff)
		in := func(p ib.PKey) sa.Join { return sa.Join{MGID: g, PKey: p, State: wire.FullMember} }
		if r := expectJoined(t, f, b, in(0x8001)); r.PKey != 0x8001 {
			t.Errorf("full member: P_Key: got %v, want 0x8001", r.PKey)
		}
		if r := expectJoined(t, f, d, in(0x0001)); r.PKey != 0x8001 {
			t.Errorf("limited member: P_Key: got %v, want 0x8001", r.PKey)
		}
		if r, status := ask(t, f, b, c.gid(), 0x8001); status != 0 || r.PKey != 0x8001 {
			t.Errorf("path between full members: got %v, %v", r, status)
		}
		if _, status := ask(t, f, d, b.gid(), 0x0001); status != 0 {
			t.Errorf("path from a limited to a full member: got %v", status)
		}
		a := f.host("A") // no member
		expectRefused(t, f, a, in(0x8001), wire.StatusInvalid, false)
		if _, status := ask(t, f, b, a.gid(), 0x8001); status != wire.StatusNoRecords {
			t.Errorf("path to who is no member: got %v, want %v", status, wire.StatusNoRecords)
		}
		wrong := sa.Join{MGID: mgid(0x8002, 0xffffffff), PKey: 0x8002, State: wire.FullMember, Create: true,
			Params: simsm.DefaultParams}
		expectRefused(t, f, b, wrong, wire.StatusInvalid, false)
		// A group is made in the partition of who makes it.
		made := sa.Join{MGID: mgid(0x8001, 5), PKey: 0x8001, State: wire.FullMember, Create: true,
			Params: simsm.DefaultParams}
		if r := expectJoined(t, f, c, made); r.PKey != 0x8001 {
			t.Errorf("a group made: P_Key: got %v, want 0x8001", r.PKey)
		}
	})
}

// TestNoBroadcastGroup: without one there is no link, unless somebody makes it.
func TestNoBroadcastGroup(t *testing.T) {
	both(t, noGroup, sa.Options{}, func(t *testing.T, f fabric) {
		b, c := f.host("B"), f.host("C")
		expectRefused(t, f, b, join(broadcast, wire.FullMember), wire.StatusInsufficientComponents, true)
		expectJoined(t, f, b, create(broadcast, wire.FullMember))
		expectJoined(t, f, c, join(broadcast, wire.FullMember))
	})
}

// TestMTU: a group whose MTU the port cannot carry is none for it.
// 4391-4.1-3
func TestMTU(t *testing.T) {
	both(t, mtu4096, sa.Options{}, func(t *testing.T, f fabric) {
		expectRefused(t, f, f.host("B"), join(broadcast, wire.FullMember), wire.StatusInvalid, false)
	})
}

// TestAdminStartsAnew: it has forgotten everybody. Groups are joined again within two
// seconds of the event, or, without one, when their time comes.
func TestAdminStartsAnew(t *testing.T) {
	const refresh = 3 * time.Second
	both(t, byDefault, sa.Options{Refresh: refresh}, func(t *testing.T, f fabric) {
		b, c, d, g := f.host("B"), f.host("C"), f.host("D"), mgid(0xffff, 0xfe)
		expectJoined(t, f, b, create(g, wire.FullMember))
		expectJoined(t, f, d, join(broadcast, wire.FullMember))
		there := func() bool { // for C, which asks and leaves
			a, ok := outcome(t, f, c, join(g, wire.FullMember)).(sa.Joined)
			expectLeft(t, f, c, g)
			return ok && a.Group.MGID == g
		}
		if !there() {
			t.Fatal("the group is not there to begin with")
		}
		f.stopSM()
		f.startSM()
		if r := b.client.Groups(); !r[0].Joined {
			t.Error("B thinks that it is no member, before it can know")
		}
		f.step(c, sa.Reregister{})
		f.step(b, sa.Reregister{})
		if !f.run(2*time.Second, there) {
			t.Error("not back within 2 s of the event")
		}
		f.stopSM()
		f.startSM()
		f.step(c, sa.Reregister{})
		if !f.run(refresh+time.Second, there) {
			t.Errorf("not back %v after it has started anew", refresh+time.Second)
		}
	})
}

// TestNoAdmin: nobody answers. That is a state of its own, in which everything that
// was asked for waits, and is done within two seconds of the return.
func TestNoAdmin(t *testing.T) {
	both(t, byDefault, sa.Options{QueryTimeout: time.Second}, func(t *testing.T, f fabric) {
		b, d := f.host("B"), f.host("D")
		expectJoined(t, f, b, join(broadcast, wire.FullMember))
		f.stopSM()
		for range 6 { // it shows at the next question, after all its tries
			outcome(t, f, b, sa.Query{PathKey: sa.PathKey{DGID: d.gid(), PKey: ib.DefaultPKey}})
			if b.client.Info().State == sa.StateAsking {
				break
			}
		}
		if got := b.client.Info().State; got != sa.StateAsking {
			t.Fatalf("state: got %v, want %v", got, sa.StateAsking)
		}
		g := mgid(0xffff, 0x77)
		f.step(b, create(g, wire.FullMember))
		f.startSM()
		joined := func() bool {
			for _, i := range b.client.Groups() {
				if !i.Joined {
					return false
				}
			}
			return true
		}
		if !f.run(2*time.Second, joined) {
			t.Error("not joined within 2 s of its return")
		}
		if r, status := ask(t, f, b, d.gid(), ib.DefaultPKey); status != 0 {
			t.Errorf("path: got %v, %v", r, status)
		}
	})
}

// TestChaos: hosts that join and leave at random while MADs are lost and come twice, and the
// administrator starts anew. In the end each is a member of what it wants.
func TestChaos(t *testing.T) {
	const refresh = 2 * time.Second
	both(t, byDefault, sa.Options{Refresh: refresh}, func(t *testing.T, f fabric) {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 0))
		want := map[string]map[ib.GID]bool{"B": {}, "C": {}, "D": {}}
		f.setLoss(0.1)
		for round := range 2 {
			for range 60 {
				h := f.host([]string{"B", "C", "D"}[r.IntN(3)])
				g := mgid(0xffff, uint32(0x100+r.IntN(4)))
				if want[h.name][g] = r.IntN(3) != 0; want[h.name][g] {
					f.step(h, create(g, wire.FullMember))
				} else {
					f.step(h, sa.Leave{MGID: g})
				}
				f.run(time.Duration(r.IntN(20))*time.Millisecond, nil)
			}
			if round == 0 {
				f.stopSM()
				f.startSM()
			}
		}
		f.setLoss(0)
		f.run(refresh, nil) // nobody was told that the administrator has forgotten them
		if !f.run(20*time.Second, func() bool { return wrong(f, want) == "" }) {
			t.Errorf("seed %d: %s", seed, wrong(f, want))
		}
		checkGroups(t, f, want)
	})
}

// wrong says in which group a host is not what it wants to be.
func wrong(f fabric, want map[string]map[ib.GID]bool) string {
	for name, groups := range want {
		in := map[ib.GID]bool{}
		for _, g := range f.host(name).client.Groups() {
			in[g.Join.MGID] = g.Joined
		}
		for g, wanted := range groups {
			if joined, there := in[g]; joined != wanted || there && !wanted {
				return fmt.Sprintf("host %s: %v: joined %v, wanted %v", name, g, joined, wanted)
			}
		}
		if i := f.host(name).client.Info(); i.State != sa.StateReady || i.InFlight+i.Waiting > 0 {
			return fmt.Sprintf("host %s: %v, %d questions out", name, i.State, i.InFlight)
		}
	}
	return ""
}

// checkGroups has host A ask the administrator whether each group that somebody wants
// is there.
func checkGroups(t *testing.T, f fabric, want map[string]map[ib.GID]bool) {
	t.Helper()
	a := f.host("A")
	for low := range uint32(4) {
		g := mgid(0xffff, 0x100+low)
		wanted := false
		for _, groups := range want {
			wanted = wanted || groups[g]
		}
		if !wanted {
			continue // a Delete that was lost each time leaves a member behind
		}
		expectJoined(t, f, a, join(g, wire.FullMember))
		expectLeft(t, f, a, g)
	}
}
