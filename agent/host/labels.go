package host

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The labels of a container of ours. Each is always set, so that an image's labels of the same names never stand.
const (
	LabelHost      = "dev.carrel.host"
	LabelWorkspace = "dev.carrel.workspace"
	LabelEpoch     = "dev.carrel.epoch"
	LabelDevices   = "dev.carrel.devices" // ids, separated by commas
	LabelMounts    = "dev.carrel.mounts"
	LabelSignature = "dev.carrel.signature"
)

func signedLabels() []string {
	return []string{LabelHost, LabelWorkspace, LabelEpoch, LabelDevices, LabelMounts}
}

// Signer signs the labels of one agent's containers, so that nobody else's pass for them.
type Signer struct {
	host string
	key  []byte
}

// NewSigner makes a signer for a host id; the key has 32 bytes.
func NewSigner(host string, key []byte) (*Signer, error) {
	if len(key) != sha256.Size || host == "" {
		return nil, fmt.Errorf("a label signer needs a host id and a key of %d bytes", sha256.Size)
	}
	return &Signer{host: host, key: slices.Clone(key)}, nil
}

// Labels returns the signed labels of a run's container.
func (s *Signer) Labels(k Key, devices []Grant, mounts []Mount) map[string]string {
	ids := make([]string, 0, len(devices))
	for _, d := range devices {
		ids = append(ids, d.ID)
	}
	described := make([]string, 0, len(mounts))
	for _, m := range mounts {
		described = append(described, describeMount(m))
	}
	labels := map[string]string{
		LabelHost:      s.host,
		LabelWorkspace: k.Workspace,
		LabelEpoch:     strconv.FormatInt(k.Epoch, 10),
		LabelDevices:   strings.Join(ids, ","),
		LabelMounts:    strings.Join(described, ";"),
	}
	labels[LabelSignature] = s.sign(k.Container(), labels)
	return labels
}

func describeMount(m Mount) string {
	source, mode := "volume:"+m.Volume, "rw"
	if m.Volume == "" {
		source = "host:" + m.HostPath
	}
	if m.ReadOnly {
		mode = "ro"
	}
	return strconv.Quote(source) + ":" + strconv.Quote(m.Target) + ":" + mode
}

// Verified is what a container's signed labels say.
type Verified struct {
	Key     Key
	Devices []string
	Mounts  string
}

// Verify reads labels whose signature holds. The container's name is part of what is signed, as the labels say it.
func (s *Signer) Verify(labels map[string]string) (Verified, bool) {
	k, ok := ParseKey(labels[LabelWorkspace] + "/" + labels[LabelEpoch])
	if !ok || labels[LabelHost] != s.host ||
		!hmac.Equal([]byte(labels[LabelSignature]), []byte(s.sign(k.Container(), labels))) {
		return Verified{}, false
	}
	v := Verified{Key: k, Mounts: labels[LabelMounts]}
	if labels[LabelDevices] != "" {
		v.Devices = strings.Split(labels[LabelDevices], ",")
	}
	return v, true
}

func (s *Signer) sign(name string, labels map[string]string) string {
	mac := hmac.New(sha256.New, s.key)
	fmt.Fprintf(mac, "carrel-labels-v1\n%q\n", name)
	for _, label := range signedLabels() {
		fmt.Fprintf(mac, "%q=%q\n", label, labels[label])
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// claimsOurs reports whether a container has a label or a name of ours, truly or not.
func claimsOurs(c Container) bool {
	if _, ok := keyOfName(c.Name); ok {
		return true
	}
	for _, label := range append(signedLabels(), LabelSignature) {
		if _, ok := c.Labels[label]; ok {
			return true
		}
	}
	return false
}
