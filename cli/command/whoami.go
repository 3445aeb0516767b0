package command

import (
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type whoAmIView struct {
	userView
	Deployment string  `json:"deployment"`
	Gateway    string  `json:"gateway"`
	TokenLabel string  `json:"token_label"`
	ExpiresAt  *moment `json:"token_expires_at,omitempty"`
}

func newWhoAmI(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use: "whoami", Short: "Who is signed in, and where", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(listFlags{format: format}); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.auth.WhoAmI(cmd.Context(), connect.NewRequest(&carrelv1.WhoAmIRequest{}))
			if err != nil {
				return err
			}
			t := resp.Msg.GetToken()
			v := whoAmIView{viewUser(resp.Msg.GetUser()), api.dep.Name, api.dep.Gateway, t.GetLabel(), momentOf(t.GetExpiresAt())}
			limit := ""
			if v.GPULimit != nil {
				limit = fmt.Sprint(*v.GPULimit)
			}
			return a.showOne(format, v, [][2]string{
				{"user", v.Name},
				{"role", v.Role},
				{"login", v.Login},
				{"uid", fmt.Sprint(v.UID)},
				{"project", v.Project},
				{"gpu limit", limit},
				{"deployment", v.Deployment},
				{"gateway", v.Gateway},
				{"token", v.TokenLabel},
				{"token ends", v.ExpiresAt.stamp()},
			})
		},
	}
	a.formatFlag(cmd, &format)
	return cmd
}

type deploymentView struct {
	Name    string `json:"name"`
	Gateway string `json:"gateway"`
	User    string `json:"user"`
	Default bool   `json:"default"`
}

func newDeployment(a *app) *cobra.Command {
	return group("deployment", "The gateways that you are signed in to", newDeploymentList(a), newDeploymentUse(a))
}

func newDeploymentList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List them", Args: exactArgs(),
		RunE: func(*cobra.Command, []string) error {
			if err := a.load(); err != nil {
				return err
			}
			names, err := a.dir.Deployments()
			if err != nil {
				return err
			}
			first, err := a.dir.Default()
			if err != nil {
				return err
			}
			var rows []deploymentView
			for _, n := range names {
				d, err := a.dir.Load(n)
				if err != nil {
					return err
				}
				rows = append(rows, deploymentView{n, d.Gateway, d.User, n == first})
			}
			return writeList(a, deploymentList(), rows, o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func deploymentList() output.List[deploymentView] {
	type col = output.Column[deploymentView]
	return output.List[deploymentView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(d deploymentView) string {
				if d.Default {
					return d.Name + " *"
				}
				return d.Name
			}, Value: func(d deploymentView) string { return d.Name }},
			{Name: "gateway", Title: "GATEWAY", Text: func(d deploymentView) string { return d.Gateway }},
			{Name: "user", Title: "USER", Text: func(d deploymentView) string { return d.User }},
			{Name: "default", Text: func(d deploymentView) string { return fmt.Sprint(d.Default) }},
		},
		ID:    func(d deploymentView) string { return d.Name },
		Empty: "none; `carrel login LINK` signs in",
	}
}

func newDeploymentUse(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "use NAME", Short: "Make one the default: commands go to it, and its workspaces are NAME.carrel", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.load(); err != nil {
				return err
			}
			dep, err := a.dir.Load(args[0])
			if err != nil {
				return failf(exitNotFound, "no deployment named %s here; `carrel deployment ls` shows them", args[0])
			}
			if err := dep.SetDefault(); err != nil {
				return err
			}
			_, err = a.writeSSH(cmd.Context())
			return err
		},
	}
}
