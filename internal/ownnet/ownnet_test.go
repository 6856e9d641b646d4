package ownnet

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

var prepared string

func TestMain(m *testing.M) {
	Main(m, func(lo netlink.Link) error {
		prepared = lo.Attrs().Name
		return nil
	})
}

// The namespace has a loopback device that is up, and nothing else.
func TestOwn(t *testing.T) {
	if !Have() {
		t.Skip("needs root for a network namespace of its own")
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if len(links) != 1 || links[0].Flags&net.FlagLoopback == 0 {
		t.Errorf("there are %v, want the loopback device alone", links)
	}
	if links[0].Flags&net.FlagUp == 0 {
		t.Errorf("%s is down", links[0].Name)
	}
	if prepared != "lo" {
		t.Errorf("%q was prepared, want lo", prepared)
	}
}
