// Package etcd finds the members of a link in etcd, and publishes this host there.
//
// Each host has a key under a lease, /ipoibcm/v1/LINK/PKEY/members/ID, whose value is a record of package
// membership. etcd deletes the key when the host has not renewed the lease for the time of the lease. A
// source reads the list once and watches it from that revision on. When the watch may have missed something
// (a compaction, no sign of life) the source reads the list again.
//
// The build tag noetcd leaves the etcd client out: New then returns an error.
package etcd

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"

	"ipoibcm/ib"
)

// A Config says which cluster, which link, and who we are.
type Config struct {
	Endpoints []string // HOST:PORT
	Link      string
	PKey      ib.PKey
	ID        string // our name on the link; empty: nothing is published

	TLS       bool   // also without files: with the system's authorities
	CA        string // file with the authorities of the servers
	Cert, Key string // files with our certificate and its key
	User      string
	Password  func() (string, error) // reads the password; nil without a user

	// Lease is how long a host stays a member after it has disappeared. Zero means 10 s.
	Lease time.Duration

	Log *slog.Logger // what no event tells; nil discards it
}

// DefaultLease is the time of a lease unless configured otherwise.
const DefaultLease = 10 * time.Second

func (c *Config) lease() time.Duration { return cmp.Or(c.Lease, DefaultLease) }

// Prefix returns the prefix of the keys of all members.
func (c *Config) Prefix() string {
	return fmt.Sprintf("/ipoibcm/v1/%s/%04x/members/", c.Link, uint16(c.PKey|ib.PKeyFull))
}
