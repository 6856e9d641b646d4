// Command ipoibcm-cni is the CNI plugin of type ipoibcm: it gives a pod an interface of IP over InfiniBand,
// connected mode. It takes the address from an IPAM plugin and has the service, ipoibcmd node, do the rest.
// The plugin itself exits once it has answered.
//
// The rules are those of the CNI specification 1.1. Missing: the plugin ignores a prevResult, so it must be
// the first of a list.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"ipoibcm/node"
)

// patience bounds the time of one request, including the time that it waits for other requests.
const patience = 90 * time.Second

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: command(add), Del: command(del),
		Check: command(check), GC: command(collect), Status: command(status)}, version.All,
		"ipoibcm: IP over InfiniBand connected mode for pods, by ipoibcmd node")
}

// A netConf is the network's configuration.
type netConf struct {
	types.PluginConf
	Master     string     `json:"master"`
	Mode       string     `json:"mode"`
	UDMTU      int        `json:"ud_mtu"`
	ReceiveMTU int        `json:"receive_mtu"`
	PKey       jsonNumber `json:"pkey"`
	Socket     string     `json:"socket"` // socket of ipoibcmd node
	node.Members
}

// A jsonNumber is a number, or a number in quotes. The quotes allow hexadecimal, which a JSON number cannot
// have.
type jsonNumber uint16

func (n *jsonNumber) UnmarshalJSON(b []byte) error {
	text := string(b)
	if unquoted, err := strconv.Unquote(text); err == nil {
		text = unquoted
	}
	v, err := strconv.ParseUint(text, 0, 16)
	if err != nil {
		return fmt.Errorf("%s is no number of 16 bits", b)
	}
	*n = jsonNumber(v)
	return nil
}

// configure reads the configuration of a request.
func configure(stdin []byte) (c netConf, err error) {
	if err := json.Unmarshal(stdin, &c); err != nil {
		return c, types.NewError(types.ErrDecodingFailure, "the configuration is not understood", err.Error())
	}
	c.Socket = cmp.Or(c.Socket, node.SocketPath)
	switch {
	case c.Master == "":
		return c, types.NewError(types.ErrInvalidNetworkConfig, "master: say which network device carries RoCEv2", "")
	case c.IPAM.Type == "":
		return c, types.NewError(types.ErrInvalidNetworkConfig,
			"ipam: say which plugin gives addresses, such as host-local", "")
	}
	return c, nil
}

// notHere maps settings of the agent that this plugin does not take to the reason. If the plugin ignored
// such a setting, the pod could be on another link, or open to other hosts, than the author of the
// configuration expects.
var notHere = map[string]string{
	"member_id": "the service names each pod", "state_dir": "the service has one for each pod",
	"underlay": "it is called master", "device": "the service makes one on master", "gid": "each pod has its own",
	"addresses": "ipam gives them", "netns": "the runtime says which", "control": "the service has one for each pod",
}

func init() {
	for _, key := range []string{"allow", "arp_accept", "cm_transport", "control_group", "create_broadcast", "ecn", "idle_timeout",
		"interfaces", "limits", "log_format", "log_level", "metric_peers", "metrics", "metrics_auth", "metrics_tls", "offload",
		"peer_allow", "peer_trust", "port", "provider", "qkey", "sandbox", "service_id", "threads", "traffic_class", "user"} {
		notHere[key] = "all pods have the default"
	}
}

// refuse returns an error if the configuration has a setting of notHere. Only ADD and STATUS call it, so
// such a setting does not keep a pod that exists from being deleted.
func refuse(stdin []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &all); err != nil {
		return types.NewError(types.ErrDecodingFailure, "the configuration is not understood", err.Error())
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if why := notHere[key]; why != "" {
			return types.NewError(types.ErrInvalidNetworkConfig, key+" cannot be set here: "+why, "leave it out")
		}
	}
	return nil
}

// failed turns err into an error of the specification. If the service does not answer, that error asks the
// runtime to try again later.
func failed(what string, err error) error {
	if errors.Is(err, node.ErrUnavailable) {
		return types.NewError(types.ErrTryAgainLater, what, err.Error()+" (start it: systemctl enable --now ipoibcm-node)")
	}
	return types.NewError(types.ErrInternal, what, err.Error())
}

// command makes a command of the plugin from f, which has to end within patience.
func command(f func(ctx context.Context, c netConf, args *skel.CmdArgs) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		c, err := configure(args.StdinData)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return f(ctx, c, args)
	}
}

// add attaches the pod. If that fails, add has the service delete the attachment, and gives the address
// back once the service has confirmed that. Without the confirmation the IPAM plugin keeps the address
// until the runtime calls DEL.
func add(ctx context.Context, c netConf, args *skel.CmdArgs) error {
	if err := refuse(args.StdinData); err != nil {
		return err
	}
	answer, err := invoke.DelegateAdd(ctx, c.IPAM.Type, args.StdinData, nil)
	if err != nil {
		return err
	}
	service, key := node.NewClient(c.Socket), node.Key{ContainerID: args.ContainerID, IfName: args.IfName}
	result, err := current.NewResultFromResult(answer)
	var a node.Attachment
	if err == nil {
		a, err = attachment(c, args, result)
	}
	if err == nil {
		err = service.Add(ctx, a)
	}
	if err != nil {
		if service.Delete(ctx, key) == nil {
			err = errors.Join(err, invoke.DelegateDel(ctx, c.IPAM.Type, args.StdinData, nil))
		}
		return failed("the interface cannot be made", err)
	}
	result.Interfaces = []*current.Interface{{Name: args.IfName, Sandbox: args.Netns}}
	for _, ip := range result.IPs {
		ip.Interface = current.Int(0)
	}
	return types.PrintResult(result, c.CNIVersion)
}

// del detaches the pod, and only then gives its address back.
func del(ctx context.Context, c netConf, args *skel.CmdArgs) error {
	if err := node.NewClient(c.Socket).Delete(ctx,
		node.Key{ContainerID: args.ContainerID, IfName: args.IfName}); err != nil {
		return failed("the interface cannot be removed", err)
	}
	return invoke.DelegateDel(ctx, c.IPAM.Type, args.StdinData, nil)
}

func check(ctx context.Context, c netConf, args *skel.CmdArgs) error {
	if err := invoke.DelegateCheck(ctx, c.IPAM.Type, args.StdinData, nil); err != nil {
		return err
	}
	if err := node.NewClient(c.Socket).Check(ctx,
		node.Key{ContainerID: args.ContainerID, IfName: args.IfName}); err != nil {
		return failed("the interface is not as it was made", err)
	}
	return nil
}

// collect has the service end the attachments of this network that the runtime no longer names. Then it has
// the IPAM plugin release their addresses.
func collect(ctx context.Context, c netConf, args *skel.CmdArgs) error {
	gc := node.GC{Network: c.Name}
	for _, v := range c.ValidAttachments {
		gc.Valid = append(gc.Valid, node.Key{ContainerID: v.ContainerID, IfName: v.IfName})
	}
	if err := node.NewClient(c.Socket).GC(ctx, gc); err != nil {
		return failed("what is left over cannot be removed", err)
	}
	return invoke.DelegateGC(ctx, c.IPAM.Type, args.StdinData, nil)
}

// errNotAvailable is the specification's error code of STATUS for a plugin that cannot
// serve ADD.
const errNotAvailable = 50

func status(ctx context.Context, c netConf, args *skel.CmdArgs) error {
	if err := refuse(args.StdinData); err != nil {
		return err
	}
	if _, err := node.NewClient(c.Socket).Status(ctx, c.Master); err != nil {
		return types.NewError(errNotAvailable, "pods cannot be attached", err.Error())
	}
	return invoke.DelegateStatus(ctx, c.IPAM.Type, args.StdinData, nil)
}
