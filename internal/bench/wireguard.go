package main

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"

	"ipoibcm/internal/lab"
	wg "ipoibcm/internal/wireguard"
)

// wireguard starts a wireguard-go on each host and makes them peers. The MTU is
// the underlay's less 80 octets, the overhead over IPv6.
func (p *pair) wireguard(ctx context.Context, b *bench, at place) error {
	under, inner := underlays(at.family), inners(at.family)
	var keys [2]*ecdh.PrivateKey
	for i := range keys {
		var err error
		if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			return err
		}
	}
	for i, h := range p.hosts {
		name := fmt.Sprintf("wgb%d", b.hosts-1+i) // its control socket is visible to all namespaces
		if err := p.startWireguard(b, h, name); err != nil {
			return err
		}
		err := wg.Configure(ctx, wg.Socket(name), keys[i], wg.Peer{Key: keys[1-i].PublicKey(),
			Endpoint: netip.AddrPortFrom(addr(under[1-i]), wg.Port),
			Allowed:  netip.PrefixFrom(addr(inner[1-i]), addr(inner[1-i]).BitLen())})
		if err != nil {
			return err
		}
		if err := errors.Join(h.SetMTU(name, at.mtu-80), h.AddAddr(name, inner[i]), h.Up(name)); err != nil {
			return err
		}
	}
	return nil
}

func (p *pair) startWireguard(b *bench, h *lab.Host, name string) error {
	log, err := os.Create(filepath.Join(b.dir, h.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(b.wireguard, "-f", name)
	c.Stdout, c.Stderr = log, log
	if err := h.Start(c); err != nil {
		return fmt.Errorf("start wireguard-go: %w", err)
	}
	p.onClose(func() {
		c.Process.Kill()
		c.Wait()
		os.Remove(wg.Socket(name))
	})
	return nil
}
