// Package node is the service of a host whose pods have interfaces of IP over InfiniBand. For each pod it
// makes an underlay device and starts an agent. It starts another agent when one has died, and ends the
// agent of a pod that has vanished.
//
// Each agent is a process of its own, which goes on while the service is started anew
// (docs/adr/0039-a-process-for-each-pod.md). What the service must know of it is in one
// file for each pod, written before anything is made.
//
// Missing: an agent's settings cannot be changed while it runs, and its underlay is
// always a macvlan device of the master.
package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
)

// Dir is the directory of the service's files, and SocketPath its socket. Only root has access to either.
// They are not in the directory of other agents' sockets, because that belongs to those agents' user.
const (
	Dir        = "/run/ipoibcm-node/pods"
	SocketPath = "/run/ipoibcm-node/socket"
)

// Paths of the service's API.
const (
	pathAttachments = "/v1/attachments"
	pathStatus      = "/v1/status"
	pathGC          = "/v1/gc"
)

// A Key names an attachment: an interface of a container.
type Key struct {
	ContainerID string `json:"container_id"`
	IfName      string `json:"ifname"`
}

// An Attachment is a request to attach: one interface of one pod.
type Attachment struct {
	Key
	Network    string         `json:"network"` // name of the network's configuration, for GC
	Netns      string         `json:"netns"`   // path of the pod's network namespace
	Master     string         `json:"master"`  // network device that carries RoCEv2
	Mode       string         `json:"mode,omitempty"`
	UDMTU      int            `json:"ud_mtu,omitempty"`
	ReceiveMTU int            `json:"receive_mtu,omitempty"`
	PKey       uint16         `json:"pkey,omitempty"`
	Members    Members        `json:"members,omitzero"`
	Addresses  []netip.Prefix `json:"addresses"`
	Routes     []Route        `json:"routes,omitempty"`
}

// Members says who else is on the link where the underlay carries no multicast. The
// settings are the agent's, of the same names; paths are of the host.
type Members struct {
	Link       string   `json:"link,omitempty"`
	Membership string   `json:"membership,omitempty"` // etcd://…, dns://…, file://…
	Peers      []string `json:"peers,omitempty"`      // GIDs
	Etcd       *Etcd    `json:"etcd,omitempty"`
}

// Etcd says how to talk to etcd.
type Etcd struct {
	CA       string `json:"ca,omitempty"`
	Cert     string `json:"cert,omitempty"`
	Key      string `json:"key,omitempty"`
	User     string `json:"user,omitempty"`
	Password string `json:"password_file,omitempty"`
	Lease    string `json:"lease,omitempty"` // such as 10s
}

// A Route is a route of the pod through the interface.
type Route struct {
	Dst      netip.Prefix `json:"dst"`
	GW       netip.Addr   `json:"gw,omitzero"`
	MTU      int          `json:"mtu,omitempty"`
	AdvMSS   int          `json:"advmss,omitempty"`
	Priority int          `json:"priority,omitempty"` // zero: the kernel's default
	Table    int          `json:"table,omitempty"`    // zero: main
	Scope    *int         `json:"scope,omitempty"`    // nil: link without a gateway, else global
}

// A GC names the attachments of a network that should exist. The service ends all others of that network.
type GC struct {
	Network string `json:"network"`
	Valid   []Key  `json:"valid"`
}

// A Status is the state of the service.
type Status struct {
	Attachments int `json:"attachments"`
	Running     int `json:"running"` // those that have an agent now
}

// An answerError is the body of the answer to a request that failed.
type answerError struct {
	Error string `json:"error"`
}

// ErrUnavailable means that the service does not answer.
var ErrUnavailable = errors.New("ipoibcmd node does not answer")

// A Client asks the service.
type Client struct{ http http.Client }

// NewClient returns a client of the service at a socket.
func NewClient(socket string) *Client { return &Client{clientOf(socket)} }

// clientOf returns a client of whoever listens on a socket.
func clientOf(socket string) http.Client {
	return http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
}

// Add attaches a pod, and returns once packets can pass.
func (c *Client) Add(ctx context.Context, a Attachment) error {
	return c.do(ctx, http.MethodPost, pathAttachments, nil, a, nil)
}

// Delete ends an attachment. It is no error if there is none.
func (c *Client) Delete(ctx context.Context, k Key) error {
	return c.do(ctx, http.MethodDelete, pathAttachments, k.query(), nil, nil)
}

// Check returns an error if an attachment is not as it was made.
func (c *Client) Check(ctx context.Context, k Key) error {
	return c.do(ctx, http.MethodGet, pathAttachments, k.query(), nil, nil)
}

// Status returns the state of the service, and an error if it could not attach to master.
func (c *Client) Status(ctx context.Context, master string) (s Status, err error) {
	return s, c.do(ctx, http.MethodGet, pathStatus, url.Values{"master": {master}}, nil, &s)
}

// GC ends the attachments of network gc.Network that gc.Valid does not name.
func (c *Client) GC(ctx context.Context, gc GC) error {
	return c.do(ctx, http.MethodPost, pathGC, nil, gc, nil)
}

func (k Key) query() url.Values {
	return url.Values{"container_id": {k.ContainerID}, "ifname": {k.IfName}}
}

// do sends a request, and decodes the answer into out if out is not nil.
func (c *Client) do(ctx context.Context, method, path string, query url.Values, in, out any) error {
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	u := url.URL{Scheme: "http", Host: "node", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), &body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	defer resp.Body.Close()
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxBody))
	if resp.StatusCode != http.StatusOK {
		var e answerError
		if answer.Decode(&e) != nil || e.Error == "" {
			e.Error = resp.Status
		}
		return errors.New(e.Error)
	}
	if out == nil {
		return nil
	}
	return answer.Decode(out)
}
