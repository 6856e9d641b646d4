//go:build !noetcd

package etcd

import (
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"ipoibcm/membership"
)

// A writer of the cluster that means harm makes records without end, with names and values as
// long as the cluster takes. What is kept of them has a bound, and the list is read again when there
// is room for those that were left out.
func TestKeysAreBounded(t *testing.T) {
	v := &session{source: &source{c: Config{Link: "l"}}, members: map[string]membership.Member{}, bad: map[string]error{}}
	event := func(del bool, id, value string) []*clientv3.Event {
		e := &clientv3.Event{Kv: &mvccpb.KeyValue{Key: []byte(v.c.Prefix() + id), Value: []byte(value)}}
		if del {
			e.Type = clientv3.EventTypeDelete
		}
		return []*clientv3.Event{e}
	}
	long := strings.Repeat("x", 1<<20)
	const good = `{"v":1,"gids":["fe80::1"]}`
	for i := range 2 * membership.MaxMembers {
		if _, again := v.events(event(false, fmt.Sprint("m", i), good)); again {
			t.Fatalf("after %d members the list is to be read again", i+1)
		}
		v.events(event(false, fmt.Sprint(i, long[:i]), good))
	}
	v.events(event(false, "y"+long, long))
	if got, want := len(v.members), membership.MaxMembers+1; got != want {
		t.Errorf("%d members are kept, want %d", got, want)
	}
	if got, want := len(v.bad), membership.MaxMembers; got > want {
		t.Errorf("%d refused records are kept, want %d at most", got, want)
	}
	for id, err := range v.bad {
		if len(id) > 300 || len(err.Error()) > 600 {
			t.Fatalf("a name of %d octets is kept, with a reason of %d", len(id), len(err.Error()))
		}
	}
	again := 0
	for i := range 2 {
		if _, full := v.events(event(true, fmt.Sprint("m", i), "")); full {
			again++
		}
	}
	if again != 1 {
		t.Errorf("of two members that went, %d made the list be read again, want 1: there is room after the second", again)
	}
	v.events(event(true, "y"+long, ""))
	if _, there := v.bad[v.name("y"+long)]; there {
		t.Error("a record with a long name that went is still shown as refused")
	}
}
