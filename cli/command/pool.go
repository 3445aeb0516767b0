package command

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type poolView struct {
	Name        string      `json:"name"`
	Description string      `json:"description"`
	Default     bool        `json:"is_default"`
	Image       string      `json:"default_image"`
	Sudo        bool        `json:"sudo"`
	MaxGPUs     int32       `json:"max_gpus_per_workspace"`
	CPUMillis   int64       `json:"default_cpu_millis"`
	MemoryMiB   int64       `json:"default_memory_mib"`
	Hosts       int32       `json:"hosts"`
	Models      []modelView `json:"models"`
	Queued      int32       `json:"queued"`
}

type modelView struct {
	Model string `json:"model"`
	Total int32  `json:"total"`
	Free  int32  `json:"free"`
}

func viewPool(p *carrelv1.Pool) poolView {
	return poolView{
		Name: p.GetName(), Description: p.GetDescription(), Default: p.GetIsDefault(), Image: p.GetDefaultImage(), Sudo: p.GetSudo(),
		MaxGPUs: p.GetMaxGpusPerWorkspace(), CPUMillis: p.GetDefaultCpuMillis(), MemoryMiB: p.GetDefaultMemoryMib(), Hosts: p.GetHosts(), Queued: p.GetQueued(),
		Models: each(p.GetModels(), func(m *carrelv1.ModelCount) modelView { return modelView{m.GetModel(), m.GetTotal(), m.GetFree()} }),
	}
}

func (p poolView) modelsText() string {
	return strings.Join(each(p.Models, func(m modelView) string { return fmt.Sprintf("%s %d/%d", m.Model, m.Free, m.Total) }), ", ")
}

func newPool(a *app) *cobra.Command {
	return group("pool", "Pools: sets of hosts under one set of rules", newPoolList(a), newPoolCreate(a), newPoolSet(a))
}

func newPoolList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List pools", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			all, err := allPages(func(token string) ([]*carrelv1.Pool, string, error) {
				resp, err := api.pools.List(cmd.Context(), connect.NewRequest(&carrelv1.PoolServiceListRequest{PageSize: pageSize, PageToken: token}))
				if err != nil {
					return nil, "", err
				}
				return resp.Msg.GetPools(), resp.Msg.GetNextPageToken(), nil
			})
			if err != nil {
				return err
			}
			return writeList(a, poolList(), each(all, viewPool), o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func poolList() output.List[poolView] {
	type col = output.Column[poolView]
	return output.List[poolView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(p poolView) string {
				if p.Default {
					return p.Name + " *"
				}
				return p.Name
			}, Value: func(p poolView) string { return p.Name }},
			{Name: "hosts", Title: "HOSTS", Right: true, Text: func(p poolView) string { return fmt.Sprint(p.Hosts) }},
			{Name: "models", Title: "FREE/GPUS", Text: poolView.modelsText},
			{Name: "queued", Title: "QUEUED", Right: true, Text: func(p poolView) string { return fmt.Sprint(p.Queued) }},
			{Name: "default_image", Title: "IMAGE", Text: func(p poolView) string { return orDash(p.Image) }, Value: func(p poolView) string { return p.Image }},
			{Name: "sudo", Title: "SUDO", Text: func(p poolView) string { return fmt.Sprint(p.Sudo) }},
			{Name: "max_gpus_per_workspace", Title: "MOST", Right: true, Text: func(p poolView) string { return countOrDash(int64(p.MaxGPUs)) }, Value: func(p poolView) string { return fmt.Sprint(p.MaxGPUs) }},
			{Name: "description", Title: "DESCRIPTION", Text: func(p poolView) string { return p.Description }},
			{Name: "is_default", Text: func(p poolView) string { return fmt.Sprint(p.Default) }},
		},
		ID:    func(p poolView) string { return p.Name },
		Empty: "no pools",
	}
}

// poolFlags are the flags of `pool create` and `pool set`.
type poolFlags struct {
	description, image, cpus, memory string
	sudo, isDefault                  bool
	maxGPUs                          int32
}

func (f *poolFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.description, "description", "", "one line for people")
	fl.StringVar(&f.image, "default-image", "", "image of workspaces that name none")
	fl.BoolVar(&f.sudo, "sudo", true, "whether sudo works inside")
	fl.BoolVar(&f.isDefault, "default", false, "make it the pool that `up` takes")
	fl.Int32Var(&f.maxGPUs, "max-gpus", 0, "most GPUs of one workspace; 0: no limit")
	fl.StringVar(&f.cpus, "cpus", "", "cores of workspaces that name none; `share`: the host's share per GPU")
	fl.StringVar(&f.memory, "memory", "", "memory of workspaces that name none; `share`: the host's share per GPU")
}

// pool returns the values, and the names of the fields that were given.
func (f *poolFlags) pool(cmd *cobra.Command, name string) (*carrelv1.Pool, []string, error) {
	p := &carrelv1.Pool{Name: name, Description: f.description, DefaultImage: f.image, Sudo: f.sudo, IsDefault: f.isDefault, MaxGpusPerWorkspace: f.maxGPUs}
	var err error
	if f.cpus != "" && f.cpus != "share" {
		if p.DefaultCpuMillis, err = parseCPUs(f.cpus); err != nil {
			return nil, nil, usagef("%v", err)
		}
	}
	if f.memory != "" && f.memory != "share" {
		if p.DefaultMemoryMib, err = parseSize("--memory", f.memory); err != nil {
			return nil, nil, usagef("%v", err)
		}
	}
	if f.maxGPUs < 0 || f.maxGPUs > maxGPUs {
		return nil, nil, usagef("--max-gpus %d: 0 to %d", f.maxGPUs, maxGPUs)
	}
	var fields []string
	for _, pair := range [][2]string{
		{"description", "description"},
		{"default-image", "default_image"},
		{"sudo", "sudo"},
		{"default", "is_default"},
		{"max-gpus", "max_gpus_per_workspace"},
		{"cpus", "default_cpu_millis"},
		{"memory", "default_memory_mib"},
	} {
		if cmd.Flags().Changed(pair[0]) {
			fields = append(fields, pair[1])
		}
	}
	return p, fields, nil
}

func newPoolCreate(a *app) *cobra.Command {
	f := poolFlags{}
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a pool (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			pool, _, err := f.pool(cmd, args[0])
			if err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.pools.Create(cmd.Context(), connect.NewRequest(&carrelv1.PoolServiceCreateRequest{RequestId: requestID(), Pool: pool}))
			if err != nil {
				return err
			}
			return a.print("%s", resp.Msg.GetPool().GetName())
		},
	}
	f.register(cmd)
	return cmd
}

func newPoolSet(a *app) *cobra.Command {
	f := poolFlags{}
	cmd := &cobra.Command{
		Use: "set NAME", Short: "Change a pool (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			pool, fields, err := f.pool(cmd, args[0])
			if err != nil {
				return err
			}
			if len(fields) == 0 {
				return usagef("carrel pool set: say what to change; see `carrel pool set --help`")
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.pools.Update(cmd.Context(), connect.NewRequest(&carrelv1.PoolServiceUpdateRequest{Pool: pool, Fields: fields}))
			if err != nil {
				return err
			}
			return a.print("%s: changed %s", resp.Msg.GetPool().GetName(), strings.Join(fields, ", "))
		},
	}
	f.register(cmd)
	return cmd
}
