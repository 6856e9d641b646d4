package rtnl

import (
	"net/netip"
	"testing"
)

func TestConfAnswer(t *testing.T) {
	const device, other = 3, 4
	v4, v6 := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd01::1")
	unicast := func(oif int) Answer { return Answer{Type: Unicast, OIF: oif} }
	local := Answer{Type: Local, OIF: 1}
	for _, tt := range []struct {
		name    string
		c       Conf
		target  netip.Addr
		route   Answer
		proxies []netip.Addr
		want    Answering
	}{
		{"address of another device", Conf{}, v4, local, nil, AnswerLocal},
		{"the same with arp_ignore", Conf{ARPIgnore: 1}, v4, local, nil, AnswerNot},
		{"IPv6 address of another device", Conf{Forward6: true, ProxyND: true}, v6, local, nil, AnswerNot},
		{"another host", Conf{Forward4: true}, v4, unicast(other), nil, AnswerNot},
		{"proxy_arp", Conf{Forward4: true, ProxyARP: true}, v4, unicast(other), nil, AnswerProxy},
		{"proxy_arp without forwarding", Conf{ProxyARP: true}, v4, unicast(other), nil, AnswerNot},
		{"proxy_arp for the link itself", Conf{Forward4: true, ProxyARP: true}, v4, unicast(device), nil, AnswerNot},
		{"proxy_arp without a route", Conf{Forward4: true, ProxyARP: true}, v4, Answer{Type: Unreachable}, nil, AnswerNot},
		{"proxy neighbour", Conf{Forward4: true}, v4, unicast(other), []netip.Addr{v6, v4}, AnswerProxy},
		{"another one", Conf{Forward4: true}, v4, unicast(other), []netip.Addr{v6}, AnswerNot},
		{"IPv6 proxy neighbour", Conf{Forward6: true, ProxyND: true}, v6, Answer{}, []netip.Addr{v6}, AnswerProxy},
		{"the same without proxy_ndp", Conf{Forward6: true}, v6, Answer{}, []netip.Addr{v6}, AnswerNot},
		{"the same without forwarding", Conf{ProxyND: true}, v6, Answer{}, []netip.Addr{v6}, AnswerNot},
	} {
		if got := tt.c.Answer(device, tt.target, tt.route, tt.proxies); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
