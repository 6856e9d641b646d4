package judge

import "testing"

func TestGuessed(t *testing.T) {
	for protocols, want := range map[string]bool{
		"eth:ethertype:ip:udp:infiniband:ethertype:ip:tcp:thrift":      true,
		"eth:ethertype:ipv6:udp:infiniband:ethertype:ipv6:tcp:data":    true,
		"eth:ethertype:ip:udp:infiniband:ethertype:ip:tcp":             false,
		"eth:ethertype:ip:udp:infiniband:ethertype:arp":                false,
		"eth:ethertype:ip:tcp:iwarp_mpa:iwarp_ddp_rdmap":               false,
		"eth:ethertype:ip:udp:infiniband:infiniband.mad:infiniband.cm": false,
	} {
		if got := guessed(protocols); got != want {
			t.Errorf("%s: %v, want %v", protocols, got, want)
		}
	}
}
